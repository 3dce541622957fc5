import pytest
from hypothesis import given
from hypothesis import strategies as st

from vtoken.kill_schedule import death_counts


def test_the_i_th_victim_dies_when_the_i_th_position_after_the_choice_is_written() -> None:
    assert death_counts([3, 5, 9], at_computed=64, interval=4) == [64, 65, 66]


def test_a_batch_as_large_as_the_interval_follows_the_schedule() -> None:
    assert death_counts([1, 2, 3, 4], at_computed=64, interval=4) == [64, 65, 66, 67]


def test_a_batch_larger_than_the_interval_dies_at_once() -> None:
    assert death_counts([1, 2, 3, 4, 5], at_computed=64, interval=4) == [64] * 5


@pytest.mark.parametrize("num_victims", [1, 3, 9])
def test_a_batch_after_a_chunk_or_under_pressure_dies_at_once(num_victims: int) -> None:
    assert death_counts(range(num_victims), at_computed=64, interval=4, at_once=True) == [64] * num_victims


def test_no_victims_no_deaths() -> None:
    assert death_counts([], at_computed=64, interval=4) == []


@given(st.integers(0, 50), st.integers(0, 1000), st.integers(1, 40), st.booleans())
def test_nobody_dies_before_the_choice_or_later_than_an_interval_after_it(
    num_victims: int, at_computed: int, interval: int, at_once: bool
) -> None:
    counts = death_counts(range(num_victims), at_computed, interval, at_once)
    assert len(counts) == num_victims
    assert counts == sorted(counts)
    assert all(at_computed <= count < at_computed + interval for count in counts)
