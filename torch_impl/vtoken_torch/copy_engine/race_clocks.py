"""Vector clocks: whether anything puts one access to memory after another.

Host and streams each have a clock. An actor's clock counts its own accesses, and says how far it knows the others'.
Every cell remembers its last write and the reads since.
"""

from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field
from typing import Final, TypeAlias

from vtoken.errors import InvariantError

__all__ = ["HOST", "Cell", "Clock", "Race", "RaceClocks"]

Cell: TypeAlias = Hashable
"""Memory that is accessed whole: a slot number, ("plan", plan) or ("pinned", plan)."""

Clock: TypeAlias = dict[str, int]

_Epoch: TypeAlias = tuple[str, int, str]  # who, its clock then, what it did

HOST: Final = "host"


class Race(InvariantError):
    """Two accesses to one cell, one of them a write, that nothing orders."""


@dataclass(slots=True)
class _Accesses:
    write: _Epoch | None = None
    reads: dict[str, _Epoch] = field(default_factory=dict)  # the last one of each actor since the write


class RaceClocks:
    """Clocks of the host and of streams, and what they did to cells.

    Args:
        raises: whether a race raises.
    """

    def __init__(self, raises: bool) -> None:
        self._raises = raises
        self._clocks: dict[str, Clock] = {HOST: {HOST: 1}}
        self._cells: dict[Cell, _Accesses] = {}

    def add(self, name: str) -> str:
        """Another actor; returns its name, which is made unique."""
        if name in self._clocks:
            name = f"{name} {len(self._clocks) - 1}"
        self._clocks[name] = {name: 0}
        return name

    def of(self, who: str) -> Clock:
        """A copy of an actor's clock."""
        return dict(self._clocks[who])

    def join(self, who: str, other: Clock) -> None:
        """From here on ``who`` comes after all that ``other`` has seen."""
        clock = self._clocks[who]
        for name, count in other.items():
            if clock.get(name, 0) < count:
                clock[name] = count

    def join_host(self, who: str) -> None:
        """``who`` does what the host enqueues now."""
        self.join(who, self._clocks[HOST])

    def access(self, who: str, what: str, reads: Iterable[Cell], writes: Iterable[Cell]) -> None:
        """One kernel, copy or host write.

        Raises:
            Race: nothing puts it after a conflicting access, or it conflicts with itself.
        """
        clock = self._clocks[who]
        clock[who] += 1
        epoch = who, clock[who], what
        writes = tuple(writes)
        written = set(writes)
        if len(written) != len(writes):
            self._report(f"{what} on {who} writes a cell twice")
        for cell in reads:
            accesses = self._of_cell(cell)
            if cell in written:
                self._report(f"{what} on {who} reads and writes {_name(cell)}, in no order")
            if not _is_known(accesses.write, clock):
                self._report(f"{what} on {who} reads {_name(cell)} and does not wait for {_past(accesses.write)}")
            accesses.reads[who] = epoch
        for cell in writes:
            accesses = self._of_cell(cell)
            for past in (accesses.write, *accesses.reads.values()):
                if not _is_known(past, clock):
                    self._report(f"{what} on {who} overwrites {_name(cell)}, which {_past(past)} may still use")
            accesses.write = epoch
            accesses.reads.clear()

    def _of_cell(self, cell: Cell) -> _Accesses:
        return self._cells.get(cell) or self._cells.setdefault(cell, _Accesses())

    def _report(self, text: str) -> None:
        if self._raises:
            raise Race(text)


def _is_known(past: _Epoch | None, clock: Clock) -> bool:
    return past is None or clock.get(past[0], 0) >= past[1]


def _name(cell: Cell) -> str:
    return f"slot {cell}" if isinstance(cell, int) else f"a {cell[0]} buffer" if isinstance(cell, tuple) else str(cell)


def _past(past: _Epoch | None) -> str:
    return "nothing" if past is None else f"'{past[2]}' on {past[0]}"
