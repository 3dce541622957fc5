"""Attention mass of one request, kept on the host as its policy declares (SPEC A-3)."""

from array import array
from bisect import bisect_right
from collections import deque
from collections.abc import Iterable, Iterator, MutableSequence, Sequence
from itertools import repeat
from math import nan

from vtoken.errors import SpecError
from vtoken.policies.base import MassNeed
from vtoken.types import Position

__all__ = ["MassRecorder"]

_UNKNOWN = 0  # the column that always reads NaN


class MassRecorder:
    """Running sum or last rows of one request, by position; moves in memory do not touch it.

    Every token that has mass owns a column until it is forgotten; a column's next owner starts afresh. So memory
    follows the live tokens, 4 bytes for each and each row of the window. ``observe`` costs O(live), ``forget``
    O(window) a token. Give rows in the order of their queries. A row that arrives after an eviction may still name
    the dead token: it is left out.
    """

    def __init__(self, need: MassNeed) -> None:
        self.need = need
        self.reset()

    def reset(self) -> None:
        """Forgets everything: at preemption, since the request is rebuilt from its first token on."""
        self._columns: dict[Position, int] = {}
        self._free: list[int] = []
        self._newest: Position = -1
        self._sums: list[float] = [nan]
        self._rows: deque[tuple[Position, array[float]]] = deque(maxlen=self.need.window)  # (query, masses by column)

    def observe(self, positions: Sequence[Position], row: Sequence[float]) -> None:
        """Takes one query's mass row.

        Args:
            positions: the live positions that the query sees, itself and doomed ones included, in any order.
            row: float32 ``[len(positions)]``, aligned with them.
        """
        columns = self._columns_of(positions, row)
        if not self.need.window:
            self._add(columns, row, self.need.decay)
            return
        masses = array("f", [0.0]) * len(self._sums)
        for column, mass in zip(columns, row, strict=True):
            masses[column] = mass
        masses[_UNKNOWN] = nan
        self._rows.append((self._newest, masses))

    def observe_sum(self, positions: Sequence[Position], masses: Sequence[float], num_queries: int) -> None:
        """Takes the summed rows of ``num_queries`` queries, for example of a prefill chunk.

        Older sums decay ``num_queries`` times; within the chunk nothing decays, since its rows are not known.
        Raises SpecError where the policy needs a window.
        """
        if self.need.window:
            raise SpecError(f"the policy needs the last {self.need.window} rows: call observe for each query")
        self._add(self._columns_of(positions, masses), masses, self.need.decay**num_queries)

    def forget(self, positions: Iterable[Position]) -> None:
        """Drops evicted tokens; positions without mass are fine."""
        for position in positions:
            column = self._columns.pop(position, None)
            if column is not None:
                self._free.append(column)

    def scores(self, live_positions: Sequence[Position]) -> tuple[list[float], list[list[float]]]:
        """``mass`` and ``mass_rows`` of a ``RequestView`` with these live positions (ascending)."""
        columns = [self._columns.get(position, _UNKNOWN) for position in live_positions]
        sums = self._sums
        if self._rows:
            sums = list(map(sum, zip(*(masses for _, masses in self._rows), strict=True)))
        rows = []
        for query, masses in self._rows if self.need.rows else ():
            seen = bisect_right(live_positions, query)
            rows.append([masses[column] for column in columns[:seen]] + [nan] * (len(columns) - seen))
        return [sums[column] for column in columns], rows

    def _add(self, columns: Iterator[int], masses: Sequence[float], decay: float) -> None:
        sums = self._sums
        for column, mass in zip(columns, masses, strict=True):
            sums[column] = sums[column] * decay + mass  # NaN stays NaN

    def _columns_of(self, positions: Sequence[Position], masses: Sequence[float]) -> Iterator[int]:
        if len(positions) != len(masses):
            raise SpecError(f"{len(masses)} masses for {len(positions)} positions: give one for each")
        new = [position for position in positions if position > self._newest]
        for position in new:
            self._columns[position] = self._new_column()
        self._newest = max(new, default=self._newest)
        return map(self._columns.get, positions, repeat(_UNKNOWN))

    def _new_column(self) -> int:
        stores: list[MutableSequence[float]] = [self._sums, *(masses for _, masses in self._rows)]
        if self._free:
            column = self._free.pop()
            for store in stores:
                store[column] = 0.0
            return column
        for store in stores:
            store.append(0.0)
        return len(self._sums) - 1
