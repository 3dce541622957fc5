"""When a mass policy is asked, and about which tokens, while results are under way."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

from vtoken.reclamation.plan import TableView
from vtoken.trace import TraceEvent
from vtoken.types import Position
from vtoken.victims import Occasion
from vtoken_torch.vllm_plugin.mass.book import MassBook
from vtoken_torch.vllm_plugin.metrics.clocks import TimedVictims

__all__ = ["MassVictims"]


@dataclass(frozen=True, slots=True)
class _Known:
    """As much of a table as the results that are back tell of."""

    table: TableView
    num_computed_tokens: int

    def candidates(self) -> list[Position]:
        return [position for position in self.table.candidates() if position < self.num_computed_tokens]


class MassVictims(TimedVictims):
    """A policy that reads a request's line of the book.

    Under asynchronous scheduling a chunk is written before its mass is known. Its tokens would count as excess and be
    no candidates, so that older ones died in their place. So the policy does not see them until then, and is asked
    again when their mass is there. A single token under way is merely no candidate.
    """

    def __init__(self, book: MassBook, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._book = book

    def choose(self, table: TableView, occasion: Occasion) -> TraceEvent | None:
        """The event; what was chosen needs no mass any more."""
        mass = self._book[occasion.trace_key]
        if mass.owes_choice:
            occasion = replace(occasion, after_chunk=True)
        mass.owes_choice = occasion.after_chunk and mass.num_chunks_under_way > 0
        event = super().choose(table, occasion)
        if event is not None:
            mass.forget(event.chosen)
        return event

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

    def _select(self, table: TableView, occasion: Occasion) -> Sequence[Position]:
        mass = self._book[occasion.trace_key]
        if not mass.num_chunks_under_way:
            return super()._select(table, occasion)
        if not mass.num_known:
            return ()
        return super()._select(cast(TableView, _Known(table, mass.num_known)), occasion)
