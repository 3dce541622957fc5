"""Seconds spent in policies and in planners. The clock is read only where one of them really works."""

from collections.abc import Sequence
from time import perf_counter
from typing import Any

from vtoken.reclamation.manager import ReclamationManager
from vtoken.reclamation.plan import Planner, PoolView, ReclamationPlan, TableView
from vtoken.types import Position
from vtoken.victims import Occasion, PolicyVictims

__all__ = ["Stopwatch", "TimedVictims", "time_planners"]


class Stopwatch:
    """Adds up the seconds of its ``with`` blocks."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._start = 0.0

    def __enter__(self) -> None:
        self._start = perf_counter()

    def __exit__(self, *_: object) -> None:
        self.seconds += perf_counter() - self._start


class TimedVictims(PolicyVictims):
    """``PolicyVictims`` under a stopwatch: candidates, scores, the policy, the check of what it chose."""

    def __init__(self, *args: Any, stopwatch: Stopwatch, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._stopwatch = stopwatch

    def _select(self, table: TableView, occasion: Occasion) -> Sequence[Position]:
        with self._stopwatch:
            return super()._select(table, occasion)


class _TimedPlanner:
    def __init__(self, planner: Planner, stopwatch: Stopwatch) -> None:
        self._planner = planner
        self._stopwatch = stopwatch

    def plan(self, table: TableView, pool: PoolView) -> ReclamationPlan | None:
        with self._stopwatch:
            return self._planner.plan(table, pool)


def time_planners(manager: ReclamationManager) -> Stopwatch:
    """From now on the manager's planners run under the stopwatch that is returned."""
    stopwatch = Stopwatch()
    for name in ("_fill", "_release"):
        setattr(manager, name, _TimedPlanner(getattr(manager, name), stopwatch))
    return stopwatch
