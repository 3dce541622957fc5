from collections.abc import Callable
from math import isnan, nan

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vtoken.config import VTokenConfig
from vtoken.errors import SpecError
from vtoken.policies import MassNeed, RequestView, evictable, lowest, num_victims, smoothed

MakeView = Callable[..., RequestView]


def test_sinks_protected_ranges_and_the_recent_window_leave_what_lies_between(make_view: MakeView) -> None:
    view = make_view(12, kv_budget=6, num_sinks=2, protected=((4, 6), (5, 7), (0, 3)))
    assert list(evictable(view, recent=3)) == [3, 7, 8]


def test_evictable_gives_indices_not_positions(make_view: MakeView) -> None:
    view = make_view(100, live=[0, 1, 50, 60, 98], kv_budget=2, num_sinks=2)
    assert list(evictable(view, recent=10, sinks=0)) == [0, 1, 2, 3]  # recent gives way to the budget: 2 are left
    assert list(evictable(view)) == [2, 3, 4]


def test_the_users_recent_goes_before_the_policys(make_view: MakeView) -> None:
    assert list(evictable(make_view(5, kv_budget=4, recent=0), recent=3)) == [0, 1, 2, 3, 4]
    assert list(evictable(make_view(5, kv_budget=2, recent=4), recent=0)) == [0]


def test_recency_goes_by_position_not_by_rank(make_view: MakeView) -> None:
    view = make_view(100, live=[0, 10, 20, 97], kv_budget=4)
    assert list(evictable(view, recent=4)) == [0, 1, 2]


def test_protecting_the_prompt_protects_every_prompt_token(make_view: MakeView) -> None:
    view = make_view(10, kv_budget=2, protected="prompt", prompt_len=7)
    assert list(evictable(view)) == [7, 8, 9]


def test_the_excess_over_a_ratio_is_counted_from_the_computed_tokens(make_view: MakeView) -> None:
    assert num_victims(make_view(100, live=list(range(40, 100)), eviction_ratio=0.5)) == 10
    assert num_victims(make_view(100, live=list(range(60, 100)), eviction_ratio=0.5)) == 0


def test_lowest_sends_ties_to_the_lower_position_for_few_and_for_many(make_view: MakeView) -> None:
    scores = [1.0, 0.0] * 20
    assert lowest(make_view(40, kv_budget=38), scores) == [1, 3]
    assert lowest(make_view(40, kv_budget=10), scores) == sorted([*range(1, 40, 2), *range(0, 20, 2)])


def test_scores_that_do_not_fit_the_live_tokens_are_refused(make_view: MakeView) -> None:
    view = make_view(3, kv_budget=1)
    with pytest.raises(SpecError, match="2 scores for 3 live tokens: give one for each"):
        lowest(view, [0.0, 0.0])
    with pytest.raises(SpecError, match="0 scores for 3 live tokens"):
        smoothed(view, [])


def test_rows_that_do_not_fit_the_mass_are_refused(make_view: MakeView) -> None:
    with pytest.raises(SpecError, match="a mass row of 2 beside a mass of 3 tokens"):
        make_view(3, kv_budget=1, mass=[0.0] * 3, rows=[[0.0] * 2])


def test_smoothing_averages_over_live_neighbours_within_half_the_window(make_view: MakeView) -> None:
    view = make_view(10, live=[0, 1, 2, 5, 6, 9], kv_budget=4, smooth=3)
    assert smoothed(view, [3.0, 0.0, 6.0, 1.0, 3.0, 8.0]) == [1.5, 3.0, 3.0, 2.0, 2.0, 8.0]


def test_unscored_neighbours_do_not_count_and_stay_unscored(make_view: MakeView) -> None:
    first, second, third = smoothed(make_view(3, kv_budget=2, smooth=3), [2.0, nan, 4.0])
    assert (first, third) == (2.0, 4.0)
    assert isnan(second)


def test_the_users_smooth_goes_before_the_policys(make_view: MakeView) -> None:
    scores = [0.0, 3.0, 0.0]
    assert smoothed(make_view(3, kv_budget=1, smooth=1), scores, 3) == scores
    assert smoothed(make_view(3, kv_budget=1), scores, 3) == [1.5, 1.0, 1.5]


def test_smoothing_keeps_a_span_whole_that_raw_scores_tear_apart(make_view: MakeView) -> None:
    scores = [0.1] * 20
    scores[10:15] = [0.9, 0.0, 0.9, 0.0, 0.9]  # one remembered span with two weak tokens in it
    raw = lowest(make_view(20, kv_budget=10), smoothed(make_view(20, kv_budget=10), scores))
    view = make_view(20, kv_budget=10, smooth=5)
    assert {11, 13} <= set(raw)
    assert not set(range(10, 15)) & set(lowest(view, smoothed(view, scores)))


@given(st.lists(st.sampled_from([0.0, 0.5, 2.0]), max_size=30), st.sampled_from([1, 3, 5, 31]))
def test_a_smoothed_score_stays_between_the_smallest_and_the_largest(scores: list[float], window: int) -> None:
    config = VTokenConfig(policy="any", kv_budget=4, smooth=window)
    view = RequestView(len(scores), 0, list(range(len(scores))), config)
    assert all(min(scores) <= value <= max(scores) for value in smoothed(view, scores))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"window": -1}, "window=-1: give a number of queries"),
        ({"decay": 1.5}, "decay=1.5: give a factor between 0 and 1"),
        ({"rows": True}, "rows=True needs a window"),
    ],
)
def test_an_impossible_need_is_refused(arguments: dict[str, float], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        MassNeed(**arguments)  # type: ignore[arg-type]
