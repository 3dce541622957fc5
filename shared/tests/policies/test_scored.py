"""h2o, scissorhands, tova, snapkv: each one's own behaviour on worlds small enough to work out by hand."""

from collections.abc import Callable
from math import nan

from vtoken.config import VTokenConfig
from vtoken.policies import MassNeed, MassRecorder, Policy, RequestView
from vtoken.policies.h2o import H2OPolicy
from vtoken.policies.scissorhands import ScissorhandsPolicy
from vtoken.policies.snapkv import SnapKVPolicy
from vtoken.policies.tova import TOVAPolicy

MakeView = Callable[..., RequestView]


def config(**options: object) -> VTokenConfig:
    return VTokenConfig.from_mapping({"policy": "any", "kv_budget": 8, **options})


def test_each_policy_asks_for_the_mass_that_its_paper_ranks_by() -> None:
    assert H2OPolicy().mass_need(config(decay=0.9)) == MassNeed(decay=0.9)
    assert TOVAPolicy().mass_need(config()) == MassNeed(window=1)
    assert SnapKVPolicy().mass_need(config()) == MassNeed(window=32)
    assert SnapKVPolicy().mass_need(config(history=5)) == MassNeed(window=5)
    assert ScissorhandsPolicy().mass_need(config()) == MassNeed(window=16, rows=True)
    assert ScissorhandsPolicy().mass_need(config(history=5)) == MassNeed(window=5, rows=True)


def test_h2o_drops_the_least_cumulated_mass_outside_the_recent_half_of_the_budget(make_view: MakeView) -> None:
    view = make_view(8, kv_budget=4, num_sinks=1, mass=[0.0, 5.0, 1.0, 4.0, 2.0, 3.0, 0.1, 0.1])
    assert H2OPolicy().select_victims(view) == [2, 3, 4, 5]
    assert H2OPolicy().select_victims(make_view(8, kv_budget=6, mass=view.mass, recent=0)) == [0, 6]


def test_h2o_does_not_freeze_on_its_first_favourites_since_newcomers_are_protected(make_view: MakeView) -> None:
    """A newcomer with nearly no mass outlives older tokens for as long as it is recent."""
    view = make_view(9, kv_budget=8, mass=[9.0, 9.0, 9.0, 9.0, 8.0, 0.1, 0.1, 0.1, 0.0])
    assert H2OPolicy().select_victims(view) == [4]
    assert H2OPolicy().select_victims(make_view(9, kv_budget=8, mass=view.mass, recent=0)) == [8]


def test_an_old_favourite_fades_only_if_the_sum_decays(make_view: MakeView) -> None:
    """Token 0 was loved once, token 1 is looked at a little all the time."""

    def victim(decay: float) -> list[int]:
        recorder = MassRecorder(H2OPolicy().mass_need(config(decay=decay)))
        recorder.observe([0, 1], [10.0, 1.0])
        for _ in range(8):
            recorder.observe([0, 1], [0.0, 1.0])
        mass, _ = recorder.scores([0, 1])
        return list(H2OPolicy().select_victims(make_view(2, kv_budget=1, recent=0, mass=mass)))

    assert victim(1.0) == [1]
    assert victim(0.5) == [0]


def test_tova_drops_what_the_last_query_ignores_and_keeps_the_newest(make_view: MakeView) -> None:
    view = make_view(6, kv_budget=4, mass=[0.5, 0.1, 0.3, 0.2, 0.4, 0.0])
    assert TOVAPolicy().select_victims(view) == [1, 3]


def test_scissorhands_counts_rows_above_the_mean_not_mass(make_view: MakeView) -> None:
    """Token 0 is huge once; token 2 is above the mean twice: persistence wins. Means: 3, 1.25, 1.5."""
    rows = [[9.0, 0.0, 0.0, nan], [1.0, 1.0, 2.0, 1.0], [0.0, 1.0, 3.0, 2.0]]
    view = make_view(4, kv_budget=2, mass=[10.0, 2.0, 5.0, 3.0], rows=rows)
    assert ScissorhandsPolicy().select_victims(view) == [0, 1]  # counts 1, 0, 2, 1; the tie goes to the lower


def test_scissorhands_counts_a_token_at_the_mean_as_not_above_it(make_view: MakeView) -> None:
    view = make_view(3, kv_budget=2, mass=[2.0, 1.0, 0.0], rows=[[2.0, 1.0, 0.0]])
    assert ScissorhandsPolicy().select_victims(view) == [1]  # counts 1, 0, 0


def test_scissorhands_evicts_nothing_before_the_first_row(make_view: MakeView) -> None:
    assert ScissorhandsPolicy().select_victims(make_view(4, kv_budget=2, mass=[nan] * 4)) == []


def test_scissorhands_keeps_the_newest_tenth_of_the_budget(make_view: MakeView) -> None:
    view = make_view(40, kv_budget=20, mass=[1.0] * 40, rows=[[1.0] * 30 + [0.0] * 10])
    assert ScissorhandsPolicy().select_victims(view)[-8:] == [*range(30, 38)]


def test_snapkv_evicts_nothing_during_prefill_and_goes_on_through_decoding(make_view: MakeView) -> None:
    def victims(computed: int) -> list[int]:
        view = make_view(computed, prompt_len=77, kv_budget=40, mass=[1.0] * computed)
        return list(SnapKVPolicy().select_victims(view))

    assert victims(64) == []  # a prompt of 77 tokens in chunks of 32: the window would be cold
    assert victims(76) == []
    assert len(victims(77)) == 37
    assert len(victims(90)) == 50


def test_snapkv_pools_over_seven_neighbours(make_view: MakeView) -> None:
    """The tokens within three places of the one that is looked at stay with it."""
    mass = [0.0] * 40
    mass[20] = 7.0
    victims = SnapKVPolicy().select_victims(make_view(40, kv_budget=7, recent=0, mass=mass))
    assert sorted(set(range(40)) - set(victims)) == [17, 18, 19, 20, 21, 22, 23]


def test_snapkv_keeps_its_observation_window_up_to_half_of_the_budget(make_view: MakeView) -> None:
    mass = [1.0] * 60 + [0.0] * 40
    assert max(SnapKVPolicy().select_victims(make_view(100, kv_budget=90, mass=mass))) == 67
    assert max(SnapKVPolicy().select_victims(make_view(100, kv_budget=20, mass=mass))) == 89


def test_no_policy_evicts_tokens_that_no_query_has_seen(make_view: MakeView) -> None:
    policies: list[Policy] = [H2OPolicy(), TOVAPolicy(), SnapKVPolicy(), ScissorhandsPolicy()]
    mass, rows = [nan, 1.0, 1.0, nan], [[nan, 1.0, 1.0, nan]]
    for policy in policies:
        assert policy.select_victims(make_view(4, kv_budget=1, recent=0, mass=mass, rows=rows)) == [1, 2]
