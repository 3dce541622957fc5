import gc

import pytest

from vtoken.errors import SpecError
from vtoken_bench import timing
from vtoken_bench.timing import Spread, cpu_us, interleaved


def test_measurements_take_turns_and_the_first_round_is_thrown_away() -> None:
    calls: list[str] = []
    figures = {"a": iter([100.0, 3.0, 1.0, 2.0]), "b": iter([100.0, 5.0, 5.0, 8.0])}

    def measure(name: str) -> float:
        calls.append(name)
        return next(figures[name])

    spreads = interleaved([lambda: measure("a"), lambda: measure("b")], repeats=3)

    assert calls == ["a", "b"] * 4
    assert spreads == [Spread(2, 1, 3), Spread(5, 5, 8)]


def test_every_round_is_reported() -> None:
    rounds: list[None] = []
    interleaved([lambda: 1.0], repeats=2, on_round=lambda: rounds.append(None))

    assert len(rounds) == 3


def test_the_garbage_collector_rests_and_comes_back_even_after_an_error() -> None:
    def fail() -> float:
        assert not gc.isenabled()
        raise RuntimeError("no figure")

    with pytest.raises(RuntimeError, match="no figure"):
        interleaved([fail], repeats=1)
    assert gc.isenabled()


def test_no_repeats_are_refused() -> None:
    with pytest.raises(SpecError, match="repeats=0: give at least 1"):
        interleaved([], repeats=0)


def test_the_clock_is_this_threads_processor_time_in_microseconds(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([5_000, 12_500])
    monkeypatch.setattr(timing, "thread_time_ns", lambda: next(clock))
    done: list[None] = []

    assert cpu_us(lambda: done.append(None)) == 7.5
    assert done == [None]
