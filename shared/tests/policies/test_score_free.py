"""none, random, streaming_llm, sliding_window."""

from collections.abc import Callable

from vtoken.fingerprint import fmix32
from vtoken.policies import RequestView
from vtoken.policies.no_eviction import NoEvictionPolicy
from vtoken.policies.random import RandomPolicy, draws
from vtoken.policies.sliding_window import SlidingWindowPolicy
from vtoken.policies.streaming_llm import StreamingLLMPolicy

MakeView = Callable[..., RequestView]


def test_none_keeps_everything_whatever_the_budget(make_view: MakeView) -> None:
    assert NoEvictionPolicy().select_victims(make_view(10, kv_budget=1)) == ()


def test_streaming_llm_keeps_the_sinks_and_the_newest(make_view: MakeView) -> None:
    view = make_view(12, kv_budget=6, num_sinks=2)
    assert StreamingLLMPolicy().select_victims(view) == [2, 3, 4, 5, 6, 7]


def test_sliding_window_keeps_no_sinks(make_view: MakeView) -> None:
    view = make_view(12, kv_budget=6, num_sinks=2)
    assert SlidingWindowPolicy().select_victims(view) == [0, 1, 2, 3, 4, 5]


def test_sliding_window_keeps_protected_tokens_all_the_same(make_view: MakeView) -> None:
    assert SlidingWindowPolicy().select_victims(make_view(6, kv_budget=3, protected=((0, 2),))) == [2, 3, 4]


def test_random_draws_are_murmur3s_finaliser_of_position_and_key() -> None:
    positions = [*range(0, 40, 3), 2**20, 2**32 - 1]
    assert draws(positions, 0x12345678) == [fmix32(position ^ 0x12345678) for position in positions]
    assert draws([], 7) == []


def test_random_depends_on_seed_and_computed_count_but_not_on_who_else_is_live(make_view: MakeView) -> None:
    def victims(computed: int, seed: int, live: list[int]) -> set[int]:
        view = make_view(computed, live=live, kv_budget=len(live) // 2, seed=seed, recent=0)
        return set(RandomPolicy().select_victims(view))

    everyone, half = list(range(200)), list(range(0, 200, 2))
    assert victims(200, 1, everyone) != victims(200, 2, everyone)
    assert victims(200, 1, everyone) != victims(201, 1, everyone)
    key = fmix32(200 ^ fmix32(1))
    assert victims(200, 1, half) == set(sorted(half, key=lambda position: fmix32(position ^ key))[:50])


def test_random_keeps_the_newest_tenth_of_the_budget(make_view: MakeView) -> None:
    for seed in range(20):
        assert max(RandomPolicy().select_victims(make_view(100, kv_budget=50, seed=seed))) < 95


def test_random_evicts_all_places_alike(make_view: MakeView) -> None:
    counts = [0] * 100
    for seed in range(400):
        for victim in RandomPolicy().select_victims(make_view(100, kv_budget=50, seed=seed, recent=0)):
            counts[victim] += 1
    assert sum(counts) == 400 * 50
    assert 140 < min(counts) <= max(counts) < 260  # mean 200, standard deviation 10: six of them
