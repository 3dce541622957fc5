from math import isnan, nan

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vtoken.errors import SpecError
from vtoken.policies import MassNeed, MassRecorder

SUM = MassNeed()
LAST_TWO = MassNeed(window=2, rows=True)


def test_a_running_sum_adds_row_after_row_and_a_newcomer_starts_with_its_own() -> None:
    recorder = MassRecorder(SUM)
    recorder.observe([0], [2.0])
    recorder.observe([0, 1], [1.0, 1.0])
    recorder.observe([0, 1, 2], [0.5, 0.25, 1.25])
    assert recorder.scores([0, 1, 2]) == ([3.5, 1.25, 1.25], [])


def test_decay_halves_what_was_before_at_each_query() -> None:
    recorder = MassRecorder(MassNeed(decay=0.5))
    recorder.observe_sum([0, 1], [4.0, 8.0], num_queries=2)
    recorder.observe([0, 1, 2], [1.0, 0.0, 1.0])
    assert recorder.scores([0, 1, 2])[0] == [3.0, 4.0, 1.0]
    recorder.observe_sum([0, 1, 2, 3, 4], [0.0] * 5, num_queries=2)
    assert recorder.scores([0, 1, 2])[0] == [0.75, 1.0, 0.25]


def test_a_window_holds_the_last_rows_and_their_sum() -> None:
    recorder = MassRecorder(LAST_TWO)
    recorder.observe([0, 1], [9.0, 9.0])
    recorder.observe([0, 1, 2], [1.0, 2.0, 3.0])
    recorder.observe([0, 1, 2, 3], [4.0, 5.0, 6.0, 7.0])
    mass, rows = recorder.scores([0, 1, 2, 3])
    assert mass == [5.0, 7.0, 9.0, 7.0]
    assert rows[0][:3] == [1.0, 2.0, 3.0]
    assert isnan(rows[0][3])  # the query came before the token
    assert rows[1] == [4.0, 5.0, 6.0, 7.0]


def test_rows_are_handed_over_only_where_the_policy_asks_for_them() -> None:
    recorder = MassRecorder(MassNeed(window=2))
    recorder.observe([0, 1], [1.0, 2.0])
    assert recorder.scores([0, 1]) == ([1.0, 2.0], [])


def test_order_in_memory_does_not_matter() -> None:
    recorder = MassRecorder(LAST_TWO)
    recorder.observe([0, 1, 2], [1.0, 2.0, 3.0])
    recorder.observe([3, 1, 0, 2], [7.0, 5.0, 4.0, 6.0])
    assert recorder.scores([0, 1, 2, 3])[0] == [5.0, 7.0, 9.0, 7.0]


@pytest.mark.parametrize("need", [SUM, LAST_TWO])
def test_a_new_token_has_no_mass_until_a_query_has_seen_it_even_where_an_evicted_one_was(need: MassNeed) -> None:
    recorder = MassRecorder(need)
    recorder.observe([0, 1, 2], [1.0, 100.0, 3.0])
    recorder.forget([1])
    mass, rows = recorder.scores([0, 2, 3])
    assert mass[:2] == [1.0, 3.0]
    assert isnan(mass[2])
    assert all(isnan(row[2]) for row in rows)
    recorder.observe([0, 2, 3], [1.0, 3.0, 5.0])
    assert recorder.scores([0, 2, 3])[0] == [2.0, 6.0, 5.0]


@pytest.mark.parametrize("need", [SUM, LAST_TWO])
def test_a_row_that_comes_after_the_eviction_does_not_bring_the_dead_token_back(need: MassNeed) -> None:
    recorder = MassRecorder(need)
    recorder.observe([0, 1, 2], [1.0, 1.0, 1.0])
    recorder.forget([1])
    recorder.observe([0, 1, 2, 3], [1.0, 50.0, 1.0, 1.0])
    mass, _ = recorder.scores([0, 1, 2, 3])
    assert isnan(mass[1])
    assert [mass[0], mass[2], mass[3]] == [2.0, 2.0, 1.0]


@pytest.mark.parametrize("need", [SUM, LAST_TWO])
def test_preemption_forgets_everything(need: MassNeed) -> None:
    recorder = MassRecorder(need)
    recorder.observe([0, 1], [1.0, 1.0])
    recorder.reset()
    assert all(isnan(mass) for mass in recorder.scores([0, 1])[0])
    recorder.observe([0], [3.0])
    mass, rows = recorder.scores([0])
    assert mass == [3.0]
    assert rows == ([[3.0]] if need.rows else [])


def test_forgetting_a_token_without_mass_is_fine() -> None:
    recorder = MassRecorder(SUM)
    recorder.forget([7])
    assert isnan(recorder.scores([7])[0][0])


def test_the_window_is_warm_after_a_prompt_that_is_no_multiple_of_the_chunk() -> None:
    recorder = MassRecorder(MassNeed(window=8, rows=True))
    for start, end in ((0, 16), (16, 32), (32, 35)):  # prompt of 35 tokens, chunks of 16: the last one has 3 queries
        for query in range(start, end):
            recorder.observe(range(query + 1), [float(query)] * (query + 1))
    mass, rows = recorder.scores(range(35))
    assert [row[0] for row in rows] == [float(query) for query in range(27, 35)]
    assert mass[0] == sum(range(27, 35))
    assert mass[34] == 34.0


def test_masses_that_do_not_fit_the_positions_are_refused_and_change_nothing() -> None:
    recorder = MassRecorder(SUM)
    with pytest.raises(SpecError, match="1 masses for 2 positions"):
        recorder.observe([0, 1], [1.0])
    assert isnan(recorder.scores([0])[0][0])


def test_a_chunk_sum_is_refused_where_the_policy_needs_a_window() -> None:
    with pytest.raises(SpecError, match="the last 2 rows: call observe for each query"):
        MassRecorder(LAST_TWO).observe_sum([0], [1.0], num_queries=1)


@given(st.data(), st.integers(0, 3))
def test_a_recorder_agrees_with_a_list_of_dicts(data: st.DataObject, window: int) -> None:
    """Decode with random evictions: the slow model keeps every row by position and adds them up."""
    need = MassNeed(window=window, rows=window > 0, decay=data.draw(st.sampled_from([0.5, 1.0])) if not window else 1.0)
    recorder = MassRecorder(need)
    history: list[dict[int, float]] = []
    live: list[int] = []
    for query in range(data.draw(st.integers(1, 12))):
        live.append(query)
        order = data.draw(st.permutations(live))
        row = {position: float(data.draw(st.integers(0, 4))) for position in order}
        recorder.observe(order, [row[position] for position in order])
        history.append(row)
        dead = data.draw(st.sets(st.sampled_from(live), max_size=3))
        recorder.forget(dead)
        live = [position for position in live if position not in dead]
    mass, rows = recorder.scores([*live, 99])
    kept = history[-window:] if window else history
    for i, position in enumerate(live):
        ages = range(len(kept) - 1, -1, -1)
        expected = sum(row.get(position, 0.0) * need.decay**age for row, age in zip(kept, ages, strict=True))
        assert mass[i] == expected
    assert isnan(mass[-1])
    same = [[row.get(position, nan) for position in [*live, 99]] for row in kept] if need.rows else []
    assert repr(rows) == repr(same)
