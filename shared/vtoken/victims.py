"""Where victims come from: a policy that chooses, or a trace that is replayed (SPEC K-1, K-4)."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from vtoken.config import VTokenConfig
from vtoken.kill_schedule import death_counts
from vtoken.policies.base import Policy, RequestView
from vtoken.reclamation.plan import TableView
from vtoken.trace import TraceEvent, VictimTrace
from vtoken.types import Position

__all__ = ["Occasion", "PolicyVictims", "Scores", "TraceVictims", "VictimSource"]

Scores: TypeAlias = Callable[[int, Sequence[Position]], tuple[Sequence[float], Sequence[Sequence[float]]]]
"""(trace_key, live positions) -> (mass, mass_rows) as ``RequestView`` wants them."""


@dataclass(frozen=True, slots=True)
class Occasion:
    """Why a request is asked for victims now."""

    trace_key: int
    prompt_len: int
    after_chunk: bool = False
    under_pressure: bool = False


class VictimSource(Protocol):
    """Chooses victims at the end of a step, and says when each dies."""

    def choose(self, table: TableView, occasion: Occasion) -> TraceEvent | None:
        """An event at the table's computed count, or None. Mutates no table."""
        ...

    def forget(self, trace_key: int) -> None:
        """The request was preempted: it is rebuilt from its first token."""
        ...


class PolicyVictims:
    """Asks a policy at intervals, after prefill chunks, and under pressure."""

    def __init__(self, config: VTokenConfig, policy: Policy, scores: Scores | None = None) -> None:
        self.config = config
        self.policy = policy
        self._scores = scores
        self._last_count: dict[int, int] = {}

    def choose(self, table: TableView, occasion: Occasion) -> TraceEvent | None:
        computed = table.num_computed_tokens
        if not self._is_due(computed, occasion):
            return None
        self._last_count[occasion.trace_key] = computed
        positions = table.candidates()
        mass, rows = self._scores(occasion.trace_key, positions) if self._scores else ((), ())
        view = RequestView(computed, occasion.prompt_len, positions, self.config, mass, rows)
        victims = tuple(self.policy.select_victims(view))
        if not victims:
            return None
        at_once = occasion.after_chunk or occasion.under_pressure
        died = death_counts(victims, computed, self.config.interval, at_once)
        return TraceEvent(occasion.trace_key, computed, victims, tuple(died))

    def forget(self, trace_key: int) -> None:
        self._last_count.pop(trace_key, None)

    def _is_due(self, computed: int, occasion: Occasion) -> bool:
        if occasion.under_pressure:
            return True
        if self.config.when == "pressure":
            return False
        last = self._last_count.get(occasion.trace_key, 0)
        return occasion.after_chunk or computed - last >= self.config.interval


class TraceVictims:
    """Replays a trace: the same victims at the same counts, whatever the layout, the variant, or the executor."""

    def __init__(self, trace: VictimTrace) -> None:
        self._trace = trace
        self._next: dict[int, int] = {}

    def choose(self, table: TableView, occasion: Occasion) -> TraceEvent | None:
        key, computed = occasion.trace_key, table.num_computed_tokens
        events = self._trace.events.get(key, [])
        index = self._next.get(key, 0)
        deaths: dict[Position, int] = {}
        while index < len(events) and events[index].at_computed <= computed:
            for victim, count in zip(events[index].chosen, events[index].died, strict=True):
                deaths[victim] = max(count, computed)  # a later event may bring a doomed token's death forward
            index += 1
        self._next[key] = index
        in_order = sorted(deaths, key=lambda victim: (deaths[victim], victim))
        died = tuple(deaths[victim] for victim in in_order)
        return TraceEvent(key, computed, tuple(in_order), died) if in_order else None

    def forget(self, trace_key: int) -> None:
        self._next.pop(trace_key, None)
