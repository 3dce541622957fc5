"""Plans and the two views that planners read (SPEC R-1)."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from vtoken.types import BlockId, Move, Position, ReqId, SlotId, set_bits

__all__ = ["Planner", "PoolView", "ReclamationPlan", "TableView", "tokens_in"]


@dataclass(frozen=True, slots=True)
class ReclamationPlan:
    """Moves and block changes of one request, made from one layout version (INV-4).

    Attributes:
        req_id: the request.
        layout_version: version that the plan was made from; the table refuses it once places have changed.
        liveness_version, num_live_tokens: the same for kills and appends, which a packed plan depends on as well.
        moves: copies, in any order (INV-5).
        freed_block_ids: blocks that leave the request's table, in table order.
        new_block_ids: free blocks that join it: at the end if ``packed``, else before the tail block.
        packed: afterwards the live tokens fill the first slots of the block list, and the cursor follows them.
    """

    req_id: ReqId
    layout_version: int
    liveness_version: int
    num_live_tokens: int
    moves: tuple[Move, ...]
    freed_block_ids: tuple[BlockId, ...]
    new_block_ids: tuple[BlockId, ...] = ()
    packed: bool = False

    @property
    def num_blocks_gained(self) -> int:
        """Blocks given back net of those taken."""
        return len(self.freed_block_ids) - len(self.new_block_ids)


class TableView(Protocol):
    """Read-only face of one request's token table. Table slots count along the block list, not along the pool."""

    @property
    def req_id(self) -> ReqId: ...
    @property
    def block_size(self) -> int: ...
    @property
    def block_ids(self) -> Sequence[BlockId]: ...
    @property
    def live_words(self) -> Sequence[int]:
        """One word for each block in table order; bit o says that slot o is live (doomed tokens are)."""
        ...

    @property
    def cursor(self) -> int:
        """Table slot of the next append."""
        ...

    @property
    def num_computed_tokens(self) -> int: ...
    @property
    def num_live_tokens(self) -> int: ...
    @property
    def num_doomed_tokens(self) -> int: ...
    @property
    def layout_version(self) -> int: ...
    @property
    def liveness_version(self) -> int: ...
    @property
    def plan_in_flight(self) -> bool: ...

    def position_at(self, table_slot: int) -> Position:
        """Position whose KV lies in a live table slot."""
        ...

    def slot_at(self, table_slot: int) -> SlotId:
        """Pool slot of a table slot."""
        ...

    def table_slot_of(self, position: Position) -> int:
        """Table slot of a computed token; of a dead one, the last that it had."""
        ...

    def next_doomed(self, count: int) -> list[Position]:
        """The first ``count`` queued victims, in the order of their deaths."""
        ...

    def candidates(self) -> list[Position]:
        """Live positions that are not doomed, ascending: what a policy may choose from."""
        ...


class PoolView(Protocol):
    """Read-only face of the block pool."""

    @property
    def num_blocks(self) -> int: ...
    @property
    def num_free(self) -> int: ...
    @property
    def num_in_flight(self) -> int: ...

    def is_private(self, block_id: BlockId) -> bool:
        """Held once and not hashed for the prefix cache: it may be written, and freeing it frees memory."""
        ...

    def not_private(self, block_ids: Sequence[BlockId]) -> list[int]:
        """Indices into ``block_ids`` of the blocks that are not private, ascending."""
        ...

    def copy_targets(self, count: int) -> list[BlockId] | None:
        """``count`` free blocks that copies may go into (none freed in this pass, INV-5), or None."""
        ...


class Planner(Protocol):
    """Makes a plan from one request's table and the pool. Mutates nothing; None says that nothing is to gain."""

    def plan(self, table: TableView, pool: PoolView) -> ReclamationPlan | None: ...


def tokens_in(table: TableView, index: int, word: int) -> Iterator[tuple[Position, SlotId]]:
    """Position and pool slot of the tokens of one block: those that ``word``, a part of its live word, names."""
    first_slot = table.block_ids[index] * table.block_size
    to_table_slot = index * table.block_size - first_slot
    position_at = table.position_at
    for slot in set_bits(word, first_slot):
        yield position_at(slot + to_table_slot), slot
