"""One request's attention mass where it is collected: on the worker's device, by packed index."""

from array import array
from collections.abc import Sequence
from math import nan

import torch
from torch import Tensor

from vtoken.errors import InvariantError
from vtoken.policies import Choice, MassNeed
from vtoken.types import Position
from vtoken_torch.ranking import above_mean, lowest
from vtoken_torch.upload import upload
from vtoken_torch.vllm_plugin.mass.orders import Answer, Masses, Question

__all__ = ["KeptMass"]

_MIN_CAPACITY = 256


class KeptMass:
    """Follows the layout, adds up each step, and answers. Memory follows the packed length.

    Attributes:
        need: how mass is kept: one running sum, or a row for each of the last ``window`` scored queries.
        num_slots: packed length; holes count.
        num_known: computed tokens, those of the last scored step included: the others have no mass yet.
    """

    def __init__(self, need: MassNeed, num_tokens: int, device: torch.device) -> None:
        """``num_tokens``: that are there already, in their order: a prefix found in the cache."""
        self.need = need
        self.num_known = 0
        self.num_slots = num_tokens
        # Row 0: the position at each index. The others: the sum, or the window's rows in turn. Beyond the length: zero.
        self._state = torch.zeros(1 + max(1, need.window), 0, dtype=torch.float64, device=device)
        self._reserve(num_tokens)
        torch.arange(num_tokens, out=self._state[0, :num_tokens])
        self._unwritten: dict[int, Position] = {}  # by index, what row 0 lacks: it is read at questions only
        self._queries: list[Position] = []  # of the window's rows, from the first row on
        self._oldest = 0  # the row that the next query takes, once all are taken

    # -- the layout --------------------------------------------------------------------------------------------------

    def write(self, place: int, start: Position, num_tokens: int) -> None:
        """Tokens from position ``start`` on lie at ``place`` and after it: at the end, or one over a dead token."""
        end = place + num_tokens
        if place > self.num_slots or (place < self.num_slots and num_tokens != 1):
            raise InvariantError(f"attention mass: {num_tokens} tokens at {place} of a layout of {self.num_slots}")
        if place < self.num_slots:
            self._state[1:, place] = 0.0
        else:
            self._reserve(end)
            self.num_slots = end
        if num_tokens == 1:
            self._unwritten[place] = start
        else:
            torch.arange(start, start + num_tokens, out=self._state[0, place:end])

    def rearrange(self, positions: "array[int]", num_computed: int) -> None:
        """A plan moved tokens: the position at each index now, -1 in a hole. Those that are new have no mass.

        ``num_computed``: more than any position.
        """
        self._settle()
        now = upload(positions, self._state.device)
        place_of = now.new_full((num_computed + 1,), -1)  # the last is that of -1
        place_of[self._state[0, : self.num_slots].long()] = torch.arange(self.num_slots, device=now.device)
        place_of[-1] = -1
        places = place_of[now]
        moved = self._state[:, places.clamp(min=0)].masked_fill(places < 0, 0.0)
        self._state.zero_()
        self.num_slots = len(positions)
        self._reserve(self.num_slots)
        self._state[1:, : self.num_slots] = moved[1:]
        self._state[0, : self.num_slots] = now

    # -- mass --------------------------------------------------------------------------------------------------------

    def add(self, masses: Tensor, num_queries: int, num_computed: int) -> None:
        """Takes a step's mass.

        Args:
            masses: float32 ``[1, length]``, the summed rows of the step's ``num_queries`` queries; with a window,
                ``[min(num_queries, window), length]``, the rows of the last of them.
            num_queries: older sums decay as often.
            num_computed: the count with them.
        """
        if masses.shape[1] != self.num_slots:
            raise InvariantError(f"attention mass of {masses.shape[1]} tokens for a layout of {self.num_slots}")
        self.num_known = num_computed
        if not self.need.window:
            sums = self._state[1, : self.num_slots]
            if self.need.decay != 1:
                sums *= self.need.decay**num_queries
            sums += masses[0]
            return
        for query, row in enumerate(masses, start=num_computed - len(masses)):
            self._state[1 + self._row_for(query), : self.num_slots] = row

    def answer(self, question: Question, dead: Tensor | None = None) -> Answer:
        """Who is to go, or the masses of all candidates. Waits for the device, once for victims.

        ``dead``: int64, indices of holes.
        """
        positions, places = self._candidates(question.doomed, dead)
        if question.choice is None:
            return self._masses(positions, places)
        return array("i", self._lowest(question.choice, positions, places))

    # -- parts -------------------------------------------------------------------------------------------------------

    def _lowest(self, choice: Choice, positions: Tensor, places: Tensor) -> list[Position]:
        rows = self._state[1:, places]
        scores = rows.sum(0) if choice.score == "mass" else above_mean(*self._seen(positions, rows))
        return lowest(choice, scores, positions, positions < self.num_known)

    def _masses(self, positions: Tensor, places: Tensor) -> Masses:
        rows = self._state[1:, places]
        mass = rows.sum(0).masked_fill_(positions >= self.num_known, nan)
        by_query = []
        if self.need.rows:
            rows, is_seen = self._seen(positions, rows)
            by_query = [array("d", row) for row in rows.masked_fill_(~is_seen, nan).tolist()]
        return Masses(array("i", positions.tolist()), array("d", mass.tolist()), by_query)

    def _seen(self, positions: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        """The window's rows, oldest query first, and who was there to be seen."""
        size = len(self._queries)
        in_order = [(self._oldest + index) % size for index in range(size)]
        queries = upload([self._queries[row] for row in in_order], positions.device)
        return rows[upload(in_order, positions.device)], positions <= queries.unsqueeze(1)

    def _candidates(self, doomed: Sequence[Position], dead: Tensor | None) -> tuple[Tensor, Tensor]:
        """Positions, ascending, and their indices: int64 ``[n]``."""
        self._settle()
        positions = self._state[0, : self.num_slots].long()
        num_out = 0
        if dead is not None:
            positions[dead] = -1
            num_out += len(dead)
        if doomed:
            positions.masked_fill_(torch.isin(positions, upload(doomed, positions.device)), -1)
            num_out += len(doomed)
        found = positions.sort()
        return found.values[num_out:], found.indices[num_out:]

    def _row_for(self, query: Position) -> int:
        if len(self._queries) < self.need.window:
            self._queries.append(query)
            return len(self._queries) - 1
        row, self._oldest = self._oldest, (self._oldest + 1) % self.need.window
        self._queries[row] = query
        return row

    def _settle(self) -> None:
        """Writes the positions that row 0 lacks."""
        if self._unwritten:
            device = self._state.device
            places = upload(list(self._unwritten), device)
            self._state[0, places] = upload(list(self._unwritten.values()), device).double()
            self._unwritten.clear()

    def _reserve(self, length: int) -> None:
        num_rows, capacity = self._state.shape
        if length > capacity:
            more = self._state.new_zeros(num_rows, max(_MIN_CAPACITY, 2 * length) - capacity)
            self._state = torch.cat((self._state, more), dim=1)
