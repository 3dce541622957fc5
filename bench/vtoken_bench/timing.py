"""Clocks: interleaved repeats, so that a slow second on the machine falls on every figure alike."""

import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from time import thread_time_ns
from typing import Self

from vtoken.errors import SpecError

__all__ = ["Spread", "cpu_us", "interleaved"]


@dataclass(frozen=True, slots=True)
class Spread:
    """Median and range of repeated measurements, in the unit of the measurement."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Self:
        """Of at least one value."""
        return cls(median(values), min(values), max(values))


def cpu_us(work: Callable[[], object]) -> float:
    """Microseconds of this thread's processor time that one call takes: what other processes do meanwhile is not in it.

    For work that neither waits nor uses other threads or devices.
    """
    start = thread_time_ns()
    work()
    return (thread_time_ns() - start) / 1000


def interleaved(
    measurements: Sequence[Callable[[], float]], repeats: int, on_round: Callable[[], object] = lambda: None
) -> list[Spread]:
    """Takes every measurement once a round, ``repeats`` rounds after one that is thrown away.

    A measurement does its own set-up outside its own clock and returns its figure. The garbage collector rests.
    """
    if repeats < 1:
        raise SpecError(f"repeats={repeats}: give at least 1")
    rounds: list[list[float]] = []
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        for _ in range(repeats + 1):
            rounds.append([measure() for measure in measurements])
            on_round()
    finally:
        if was_enabled:
            gc.enable()
    return [Spread.of(figures) for figures in zip(*rounds[1:], strict=True)]
