"""Attention mass on the device, by request row and position, and the choice of victims from it (SPEC A-3).

Positions never change, so that moves and recycled slots do not touch it. What is kept of a dead token is never read.
"""

from collections.abc import Sequence
from math import nan

import torch
from torch import Tensor

from vtoken.policies.base import MassNeed
from vtoken.policies.ranking import Choice
from vtoken.types import Position
from vtoken_torch.ranking import above_mean, lowest
from vtoken_torch.upload import upload

__all__ = ["MassBook"]


class MassBook:
    """Mass of all rows, as one policy needs it. Memory follows the highest position, whatever is live.

    Without a window one layer holds the running sum; else layer ``p % window`` is the mass row of the query at
    position p.

    Attributes:
        masses: ``[num_rows, max(1, window), capacity]`` float32.
    """

    def __init__(self, need: MassNeed, num_rows: int, device: torch.device) -> None:
        self.need = need
        self.masses = torch.zeros(num_rows, max(1, need.window), 0, device=device)
        self._queries: dict[int, tuple[Position, Position]] = {}  # from and to, by row

    def expect(self, row: int, start: Position, num_queries: int) -> None:
        """The step under way has these queries of the row. Makes room for them."""
        first, _ = self._queries.get(row, (start, 0))
        end = start + num_queries
        self._queries[row] = first, end
        num_rows, num_layers, capacity = self.masses.shape
        if end > capacity:
            more = self.masses.new_zeros(num_rows, num_layers, max(256, 2 * end) - capacity)
            self.masses = torch.cat((self.masses, more), dim=2)

    def add(self, rows: Tensor, queries: Tensor, positions: Tensor, masses: Tensor, num_queries: int = 1) -> None:
        """Adds mass that was expected.

        Args:
            rows: ``[r]`` int64, distinct.
            queries: ``[r, kept]`` int64, positions of the queries whose rows are kept.
            positions: ``[r, n]``, who was attended to; a position may stand there twice.
            masses: ``[r, kept, n]`` float32; without a window one row, the queries' sum, decayed within the step.
            num_queries: of each row in this step: older sums decay as often.
        """
        where = rows.unsqueeze(1)
        if self.need.window:
            layers = queries % self.need.window
            self.masses[where, layers] = 0.0
        else:
            layers = torch.zeros_like(queries[:, :1])
            if self.need.decay != 1:
                self.masses[where, 0] *= self.need.decay**num_queries
        places = where.unsqueeze(2), layers.unsqueeze(2), positions.unsqueeze(1).long()
        self.masses.index_put_(places, masses, accumulate=True)

    def forget(self, row: int) -> None:
        """The row's next request starts at zero."""
        if self._queries.pop(row, None) is not None:
            self.masses[row] = 0.0

    def scores(self, row: int, positions: Sequence[Position]) -> tuple[list[float], list[list[float]]]:
        """``mass`` and ``mass_rows`` of a ``RequestView`` with these live positions."""
        places = upload(positions, self.masses.device)
        mass = self._sums(row, places).tolist()
        if not self.need.rows:
            return mass, []
        rows, seen = self._window(row, places)
        return mass, rows.masked_fill(~seen, nan).tolist()

    def lowest(self, row: int, positions: Tensor, choice: Choice) -> list[Position]:
        """Victims among candidates ``[n]`` int64, ascending, as ``RanksOnDevice`` says. Only they go to the host."""
        scores = self._sums(row, positions) if choice.score == "mass" else above_mean(*self._window(row, positions))
        _, end = self._queries.get(row, (0, 0))
        return sorted(lowest(choice, scores, positions, positions < end))

    def _sums(self, row: int, positions: Tensor) -> Tensor:
        """``[n]`` float64; NaN where a token has no mass yet."""
        _, end = self._queries.get(row, (0, 0))
        masses = self._at(row, positions).sum(0)
        return masses.masked_fill(positions >= end, nan)

    def _window(self, row: int, positions: Tensor) -> tuple[Tensor, Tensor]:
        """The window's rows, oldest query first, ``[queries, n]`` float64, and who was there to be seen, bool."""
        first, end = self._queries.get(row, (0, 0))
        queries = torch.arange(max(first, end - self.need.window), end, device=positions.device)
        rows = self._at(row, positions)[queries % self.need.window]
        return rows, positions <= queries.unsqueeze(1)

    def _at(self, row: int, positions: Tensor) -> Tensor:
        """``[layers, n]`` float64; a position beyond the capacity reads zero."""
        capacity = self.masses.shape[2]
        if not capacity:
            return torch.zeros(self.masses.shape[1], len(positions), dtype=torch.float64, device=positions.device)
        found = self.masses[row][:, positions.clamp(max=capacity - 1)].double()
        return found.masked_fill(positions >= capacity, 0.0)
