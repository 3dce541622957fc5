"""What the model is made of: blocks known by identity, requests as rows of positions, changes that plans make."""

from dataclasses import dataclass, field
from itertools import chain

from vtoken.errors import SpecError
from vtoken.types import BlockId, Position

__all__ = ["Block", "Change", "Refusal", "Request"]


class Refusal(Exception):
    """The spec forbids this call: it must raise ``error`` and change nothing."""

    def __init__(self, rule: str, reason: str, error: type[SpecError] = SpecError) -> None:
        super().__init__(reason)
        self.rule = rule
        self.error = error


@dataclass(eq=False, slots=True)
class Block:
    """One physical block. ``block_id`` is what the executor calls it, once that was seen."""

    block_id: BlockId | None = None


@dataclass(slots=True)
class Request:
    """One request: ``rows[i][o]`` is the live position in slot ``o`` of ``blocks[i]``, or None for a hole."""

    blocks: list[Block] = field(default_factory=list)
    rows: list[list[Position | None]] = field(default_factory=list)
    kv: dict[Position, bytes] = field(default_factory=dict)
    doomed: list[Position] = field(default_factory=list)
    num_computed: int = 0
    cursor: int = 0
    plan_in_flight: bool = False
    num_layout_changes: int = 0
    num_liveness_changes: int = 0

    def physical_order(self) -> list[Position]:
        """Live positions block by block, low offset first."""
        return [position for position in chain.from_iterable(self.rows) if position is not None]

    def place_of(self, position: Position) -> tuple[int, int]:
        """Index of the block and offset in it where a live position lies."""
        for index, row in enumerate(self.rows):
            if position in row:
                return index, row.index(position)
        raise KeyError(position)

    def is_packed(self) -> bool:
        """R-5: live tokens fill the first slots, no block is held beyond them, the cursor follows the last one."""
        slots = list(chain.from_iterable(self.rows))
        num_live = len(self.kv)
        size = len(self.rows[0]) if self.rows else 1
        return None not in slots[:num_live] and self.cursor == num_live and len(self.rows) == -(-num_live // size)


@dataclass(frozen=True, slots=True)
class Change:
    """What a plan does, in the model's words: targets are (block, offset), a fresh block being named by its rank."""

    leaving: tuple[Block, ...]
    num_fresh: int
    moves: dict[Position, tuple[Block | int, int]]
    packed: bool
