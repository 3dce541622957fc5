"""When a mass policy is asked, about which tokens, and what the workers are asked before."""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

from vtoken.policies import RankedPolicy, RequestView
from vtoken.reclamation.plan import TableView
from vtoken.trace import TraceEvent
from vtoken.types import Position
from vtoken.victims import Occasion
from vtoken_torch.vllm_plugin.mass.book import MassBook
from vtoken_torch.vllm_plugin.mass.orders import Question
from vtoken_torch.vllm_plugin.metrics.clocks import TimedVictims

__all__ = ["MassVictims"]


@dataclass(frozen=True, slots=True)
class _Known:
    """As much of a table as the results that are back tell of."""

    table: TableView
    num_computed_tokens: int

    def candidates(self) -> list[Position]:
        return [position for position in self.table.candidates() if position < self.num_computed_tokens]

    @property
    def num_live_tokens(self) -> int:
        return len(self.candidates()) + self.table.num_doomed_tokens

    def __getattr__(self, name: str) -> Any:
        return getattr(self.table, name)


class MassVictims(TimedVictims):
    """A policy whose request's mass lies with the workers.

    What a choice needs is asked with the step whose result it waits for, and answered with that result: for the count
    at which the choice is due, one token for each pass that comes between (``lead``). An answer ranks a few more tokens
    than are wanted, so that it serves the choice whatever the passes between brought.

    Under asynchronous scheduling a chunk is written before its mass is known. Its tokens would count as excess and be
    no candidates, so that older ones died in their place. So the policy does not see them until then, and is asked
    again when their mass is there. A single token under way is merely no candidate.
    """

    def __init__(self, book: MassBook, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, lowest=book.lowest, **kwargs)
        self._book = book

    def choose(self, table: TableView, occasion: Occasion) -> TraceEvent | None:
        """The event; what was chosen needs no mass any more."""
        mass = self._book[occasion.trace_key]
        if occasion.trace_key in self._rebuild_to:
            mass.asked_for = 0  # it repeats an event, and uses no answer
        if mass.owes_choice:
            occasion = replace(occasion, after_chunk=True)
        mass.owes_choice = occasion.after_chunk and mass.num_chunks_under_way > 0
        event = super().choose(table, occasion)
        mass.owes_choice |= mass.is_wanted and not occasion.under_pressure
        if event is not None:
            mass.forget(event.chosen)
        return event

    def question(self, table: TableView, occasion: Occasion, lead: int) -> Question | None:
        """What to ask with the step of the pass that is closed. ``table``: with its tokens.

        ``occasion``: of the choice that will use the answer, ``lead`` passes after the next one opens.
        """
        expected = table.num_computed_tokens + lead
        if not self._may_be_used(occasion, table.num_computed_tokens, expected):
            return None
        choice = None
        if isinstance(self.policy, RankedPolicy):
            view = RequestView(expected, occasion.prompt_len, (), self.config)
            num_candidates = table.num_live_tokens - table.num_doomed_tokens + lead
            choice = self.policy.choice(view, num_candidates)
            if choice is None:
                return None
            choice = replace(choice, count=choice.count + 2 * lead)
        return Question(choice, array("i", table.next_doomed(table.num_doomed_tokens)))

    def next_count(self, trace_key: int, must_evict: bool = False) -> int | None:
        """The next pass, where a choice is owed."""
        return 0 if self._book[trace_key].owes_choice else super().next_count(trace_key, must_evict)

    def restart(self, trace_key: int, num_computed: int) -> None:
        """Mass is forgotten at preemption."""
        super().restart(trace_key, num_computed)
        self._book.restart(trace_key)

    def finish(self, trace_key: int) -> None:
        """Closes the line."""
        super().finish(trace_key)
        self._book.close(trace_key)

    def _may_be_used(self, occasion: Occasion, computed: int, expected: int) -> bool:
        key = occasion.trace_key
        mass = self._book[key]
        if computed < self._rebuild_to.get(key, 0):
            return False  # it repeats its own events
        if occasion.under_pressure or mass.is_wanted:
            return True
        if self.config.when == "pressure" and not occasion.must_evict:
            return False
        last = max(self._last_count.get(key, 0), mass.asked_for)
        return occasion.after_chunk or expected - last >= self.config.interval

    def _select(self, table: TableView, occasion: Occasion) -> Sequence[Position]:
        mass = self._book[occasion.trace_key]
        mass.is_wanted, mass.asked_for = False, min(mass.asked_for, table.num_computed_tokens)
        if mass.num_chunks_under_way:
            if not mass.num_known:
                return ()
            table = cast(TableView, _Known(table, mass.num_known))
        if not isinstance(self.policy, RankedPolicy) and mass.scores(()) is None:
            mass.is_wanted = True
            return ()
        return super()._select(table, occasion)
