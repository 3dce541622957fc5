"""The declared rule against the policies' own choice: a device that knows the rule alone must choose the same."""

from collections.abc import Callable
from math import nan

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vtoken.config import VTokenConfig
from vtoken.policies import Choice, Policy, RankedPolicy, Ranking, RequestView, get_policy

MakeView = Callable[..., RequestView]
Choose = Callable[..., list[int]]
RANKED = ("h2o", "tova", "snapkv", "scissorhands")


@st.composite
def views(draw: st.DrawFn) -> RequestView:
    computed = draw(st.integers(1, 40))
    live = sorted(draw(st.sets(st.integers(0, computed - 1), min_size=1)))
    masses = st.integers(0, 6).map(float)
    num_seen = draw(st.integers(0, len(live)))  # the newest have no mass yet
    rows = []
    for _ in range(draw(st.integers(0, 3))):
        seen = draw(st.integers(0, num_seen))
        rows.append([draw(masses) for _ in live[:seen]] + [nan] * (len(live) - seen))
    config = VTokenConfig(
        policy="any",
        kv_budget=draw(st.integers(1, 30)),
        num_sinks=draw(st.integers(0, 3)),
        recent=draw(st.sampled_from([None, 0, 5])),
        smooth=draw(st.sampled_from([None, 1, 5])),
        protected=draw(st.sampled_from([(), ((3, 6), (5, 9)), "prompt"])),
    )
    mass = [draw(masses) for _ in live[:num_seen]] + [nan] * (len(live) - num_seen)
    return RequestView(computed, draw(st.integers(1, 20)), live, config, mass, rows)


@pytest.mark.parametrize("name", RANKED)
@settings(max_examples=40)
@given(view=views())
def test_a_device_that_knows_the_rule_alone_chooses_the_same(choose: Choose, name: str, view: RequestView) -> None:
    policy = get_policy(name)
    assert isinstance(policy, RankedPolicy)
    bare = RequestView(view.num_computed_tokens, view.prompt_len, (), view.config)
    choice = policy.choice(bare, len(view.live_positions))
    chosen = choose(view.live_positions, view.mass, view.mass_rows, choice) if choice else []
    assert chosen == list(policy.select_victims(view))


@pytest.mark.parametrize("name", RANKED)
def test_within_the_budget_there_is_no_choice(make_view: MakeView, name: str) -> None:
    policy = get_policy(name)
    assert isinstance(policy, RankedPolicy)
    assert policy.choice(make_view(20, live=(), kv_budget=12), 12) is None
    assert policy.choice(make_view(20, live=(), kv_budget=12), 13) is not None


def test_a_choice_holds_the_users_window_and_what_is_protected(make_view: MakeView) -> None:
    policy = get_policy("snapkv")
    assert isinstance(policy, RankedPolicy)
    view = make_view(40, live=(), kv_budget=20, num_sinks=2, protected=((8, 10),), smooth=3, prompt_len=5)
    assert policy.choice(view, 26) == Choice(6, "mass", 3, ((2, 8), (10, 30)))
    assert policy.choice(make_view(4, live=(), kv_budget=2, prompt_len=5), 4) is None


def test_policies_by_place_or_page_are_no_rankings() -> None:
    for name in ("streaming_llm", "sliding_window", "random", "paged_eviction", "none"):
        assert not isinstance(get_policy(name), RankedPolicy)


def test_a_ranked_policy_of_your_own_needs_the_rule_alone(make_view: MakeView) -> None:
    class Least(RankedPolicy):
        name = "least"

        def ranking(self, view: RequestView) -> Ranking:
            return Ranking()

    class Bare(RankedPolicy):
        name = "bare"

    view = make_view(4, kv_budget=2, mass=[3.0, 1.0, 2.0, 0.5])
    policy: Policy = Least()
    assert policy.select_victims(view) == [1, 3]
    with pytest.raises(NotImplementedError, match="Bare lacks ranking: return a Ranking from it"):
        Bare().select_victims(view)
