"""Recycles of one request in vLLM that go on by themselves: from its count follows which slot each token takes."""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from vllm.v1.request import Request

from vtoken.types import Position, SlotId

__all__ = ["Death", "Recycling", "num_in_turn"]

Death = tuple[int, Position]
"""The count at which a doomed token dies, and the token."""


@dataclass(slots=True)
class Recycling:
    """Recycles of one request that go on by themselves; all but the deaths follows from its count.

    Attributes:
        request: vLLM's. It has no drafts in a pass, so that its count is the settled one.
        first, num_dead, slots: as in ``Recycles``.
        deaths: those to come, shared with the driver; the first are those of ``slots``.
        num_settled: how many of them were taken off.
    """

    request: Request
    first: Position
    num_dead: int
    slots: list[SlotId]
    deaths: deque[Death]
    num_settled: int = 0

    @property
    def end(self) -> int:
        """The count at which they are over."""
        return self.first + len(self.slots)

    @property
    def num_done(self) -> int:
        """How many of them have happened, the closed pass's included."""
        return int(self.request.num_computed_tokens) - self.first

    @property
    def num_dead_now(self) -> int:
        """Dead tokens of the request, those that it recycled included."""
        return self.num_dead + self.num_done

    @property
    def last_slot(self) -> SlotId:
        """Where the newest token went."""
        return self.slots[self.num_done - 1]


def num_in_turn(deaths: Iterable[Death], count: int) -> int:
    """How many of these are alone at their counts, one after another from ``count`` on."""
    num = 0
    for due, _ in deaths:
        if due > count + num:
            break
        if due < count + num and num:  # two at one count: a plan must follow
            return num - 1
        num += 1
    return num
