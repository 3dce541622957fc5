"""Where victims come from: a policy that chooses, or a trace that is replayed (SPEC K-1, K-4)."""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from operator import lt
from typing import Protocol, TypeAlias

from vtoken.config import VTokenConfig
from vtoken.errors import InvariantError, SpecError
from vtoken.kill_schedule import death_counts
from vtoken.policies.base import Policy, RequestView
from vtoken.policies.ranking import Choice, RankedPolicy
from vtoken.reclamation.plan import TableView
from vtoken.trace import TraceEvent, VictimTrace
from vtoken.types import Position

__all__ = ["Lowest", "Occasion", "PolicyVictims", "Scores", "TraceVictims", "VictimSource"]

Scores: TypeAlias = Callable[[int, Sequence[Position]], tuple[Sequence[float], Sequence[Sequence[float]]]]
"""(trace_key, live positions) -> (mass, mass_rows) as ``RequestView`` wants them."""

Lowest: TypeAlias = Callable[[int, Sequence[Position] | None, Choice], Sequence[Position]]
"""(trace_key, candidates or None for all live tokens, choice) -> victims, ascending: a choice made on the device."""


@dataclass(frozen=True, slots=True)
class Occasion:
    """Why a request is asked for victims now."""

    trace_key: int
    prompt_len: int
    after_chunk: bool = False
    under_pressure: bool = False
    must_evict: bool = False  # longer than the pool: by interval, whatever ``when`` says (SPEC M-5)


class VictimSource(Protocol):
    """Chooses victims at the end of a step, and says when each dies."""

    def choose(self, table: TableView, occasion: Occasion) -> TraceEvent | None:
        """An event at the table's computed count, or None. Mutates no table."""
        ...

    def next_count(self, trace_key: int, must_evict: bool = False) -> int | None:
        """The lowest computed count at which a decode step may bring an event; None if none is in sight.

        Below it ``choose`` need not be asked. Chunk ends and pressure are occasions at any count.
        """
        ...

    def restart(self, trace_key: int, num_computed: int) -> None:
        """The request was preempted at this count and is rebuilt from its first token on.

        Past deaths apply again at chunk ends.
        """
        ...

    def finish(self, trace_key: int) -> None:
        """The request has ended; nothing is kept for it."""
        ...


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

    def next_count(self, trace_key: int, must_evict: bool = False) -> int | None:
        events, index = self._trace.events.get(trace_key, []), self._next.get(trace_key, 0)
        return events[index].at_computed if index < len(events) else None

    def restart(self, trace_key: int, num_computed: int) -> None:
        self._next.pop(trace_key, None)

    def finish(self, trace_key: int) -> None:
        self._next.pop(trace_key, None)


class PolicyVictims:
    """Asks a policy at intervals, after prefill chunks, and under pressure; ``on_event`` records what it chose.

    With ``lowest`` a ``RankedPolicy`` is applied where the mass lies; ``scores`` serves every other policy.
    A preempted request first repeats its own events, since the scores behind them are gone.
    """

    def __init__(
        self,
        config: VTokenConfig,
        policy: Policy,
        scores: Scores | None = None,
        on_event: Callable[[TraceEvent], None] | None = None,
        lowest: Lowest | None = None,
    ) -> None:
        self.config = config
        self.policy = policy
        self._scores = scores
        self._lowest = lowest
        self._on_event = on_event
        self._last_count: dict[int, int] = {}
        self._past = VictimTrace()
        self._repeat = TraceVictims(self._past)
        self._rebuild_to: dict[int, int] = {}  # up to which count a preempted request repeats its past

    def choose(self, table: TableView, occasion: Occasion) -> TraceEvent | None:
        key, computed = occasion.trace_key, table.num_computed_tokens
        if key in self._rebuild_to:
            if computed >= self._rebuild_to[key]:
                del self._rebuild_to[key]
            return self._repeat.choose(table, occasion)
        victims = self._select(table, occasion) if self._is_due(computed, occasion) else ()
        doomed = table.next_doomed(table.num_doomed_tokens) if occasion.under_pressure else []
        if not victims and not doomed:
            return None
        at_once = occasion.after_chunk or occasion.under_pressure
        chosen = (*doomed, *victims)
        event = TraceEvent(key, computed, chosen, tuple(death_counts(chosen, computed, self.config.interval, at_once)))
        self._past.add(event)
        if self._on_event:
            self._on_event(event)
        return event

    def next_count(self, trace_key: int, must_evict: bool = False) -> int | None:
        if trace_key in self._rebuild_to:
            return 0
        if self.config.policy == "none" or (self.config.when == "pressure" and not must_evict):
            return None
        return self._last_count.get(trace_key, 0) + self.config.interval

    def restart(self, trace_key: int, num_computed: int) -> None:
        self._repeat.restart(trace_key, num_computed)
        if num_computed:
            self._rebuild_to[trace_key] = max(num_computed, self._rebuild_to.get(trace_key, 0))

    def finish(self, trace_key: int) -> None:
        self._past.events.pop(trace_key, None)
        self._repeat.finish(trace_key)
        for counts in (self._last_count, self._rebuild_to):
            counts.pop(trace_key, None)

    def _is_due(self, computed: int, occasion: Occasion) -> bool:
        if occasion.under_pressure:
            return True
        if self.config.when == "pressure" and not occasion.must_evict:
            return False
        last = self._last_count.get(occasion.trace_key, 0)
        return occasion.after_chunk or computed - last >= self.config.interval

    def _select(self, table: TableView, occasion: Occasion) -> Sequence[Position]:
        computed = table.num_computed_tokens
        self._last_count[occasion.trace_key] = computed
        if self._lowest and isinstance(self.policy, RankedPolicy):
            return self._rank(self._lowest, self.policy, table, occasion)
        positions = table.candidates()
        mass, rows = self._scores(occasion.trace_key, positions) if self._scores else ((), ())
        view = RequestView(computed, occasion.prompt_len, positions, self.config, mass, rows)
        return _checked_victims(self.policy, view, self.policy.select_victims(view))

    def _rank(self, lowest: Lowest, policy: RankedPolicy, table: TableView, occasion: Occasion) -> Sequence[Position]:
        """The policy's choice, made on the device. O(victims) on the host, unless tokens are doomed."""
        view = RequestView(table.num_computed_tokens, occasion.prompt_len, (), self.config)
        choice = policy.choice(view, table.num_live_tokens - table.num_doomed_tokens)
        if choice is None:
            return ()
        victims = lowest(occasion.trace_key, table.candidates() if table.num_doomed_tokens else None, choice)
        _check_ranked(victims, choice, table)
        return victims


def _check_ranked(victims: Sequence[Position], choice: Choice, table: TableView) -> None:
    """A device's answer must be such a choice: that many at most, ascending, in the spans, all of them live."""
    is_sound = len(victims) <= choice.count and all(map(lt, victims, victims[1:]))
    if not is_sound or not all(_may_die(victim, choice, table) for victim in victims):
        raise InvariantError(
            f"device choice for request {table.req_id!r} at {table.num_computed_tokens} computed tokens: "
            f"{list(victims)} are not up to {choice.count} live tokens in {list(choice.spans)}, ascending"
        )


def _may_die(victim: Position, choice: Choice, table: TableView) -> bool:
    if not any(low <= victim < high for low, high in choice.spans):
        return False
    index, offset = divmod(table.table_slot_of(victim), table.block_size)
    is_live = table.live_words[index] >> offset & 1
    return bool(is_live) and table.position_at(index * table.block_size + offset) == victim


def _checked_victims(policy: Policy, view: RequestView, victims: Sequence[Position]) -> list[Position]:
    """What a policy chose, ascending, or a SpecError that names the policy and the position: it may be a user's own."""
    candidates, where = view.live_positions, f"policy {policy.name!r} at {view.num_computed_tokens} computed tokens"
    try:
        chosen = sorted(victims)
    except TypeError:
        raise SpecError(f"{where} returned {type(victims).__name__}: return a list of positions") from None
    if not _are_among(chosen, candidates):
        _raise_fault(chosen, candidates, where)
    if chosen and len(chosen) == len(candidates):
        raise SpecError(f"{where} chose every live token: keep at least one, better view.budget of them")
    return chosen


def _are_among(chosen: Sequence[Position], candidates: Sequence[Position]) -> bool:
    """Whether these are plain integers, each once, and each a candidate. Quick, for it is nearly always so."""
    if not chosen:
        return True
    if not set(map(type, chosen)) <= {int} or len(set(chosen)) != len(chosen) or chosen[-1] > candidates[-1]:
        return False
    return chosen == [candidates[bisect_left(candidates, victim)] for victim in chosen]


def _raise_fault(chosen: Sequence[Position], candidates: Sequence[Position], where: str) -> None:
    for victim, following in pairwise([*chosen, None]):
        if not isinstance(victim, int) or isinstance(victim, bool):
            raise SpecError(f"{where} chose {victim!r}: return positions as plain integers")
        index = bisect_left(candidates, victim)
        if index == len(candidates) or candidates[index] != victim:
            raise SpecError(f"{where} chose position {victim}: choose among view.live_positions")
        if victim == following:
            raise SpecError(f"{where} chose position {victim} twice: name each victim once")
