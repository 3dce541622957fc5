"""Planner ``fill`` (SPEC R-5): live tokens of the emptiest blocks go into the holes of the fuller ones.

"Two fingers", as in swap-remove: no fresh block, and the layout is packed afterwards, so that unmodified paged
kernels serve it. Order within a request changes, which attention does not see.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Protocol

from vtoken.reclamation.plan import PoolView, ReclamationPlan, TableView, tokens_in
from vtoken.types import BlockId, Move, Position, SlotId, cdiv, set_bits

__all__ = ["FillPlanner", "HeldBlocks", "num_fresh_blocks"]


class HeldBlocks(Protocol):
    """As much of a ``TableView`` as it takes to count blocks."""

    @property
    def block_size(self) -> int: ...
    @property
    def block_ids(self) -> Sequence[BlockId]: ...
    @property
    def live_words(self) -> Sequence[int]: ...
    @property
    def num_live_tokens(self) -> int: ...


def num_fresh_blocks(table: HeldBlocks, pool: PoolView) -> int:
    """Free blocks that ``fill`` takes for such a table, to copy survivors of blocks that are not private into."""
    return _sort_blocks(table, pool).num_fresh


@dataclass(frozen=True, slots=True)
class _Sorted:
    """A request's blocks by what happens to them; entries are indices into the block list."""

    kept: list[int]
    left: list[int]
    num_fresh: int
    num_live: int  # live tokens outside the blocks that stay as they are


class FillPlanner:
    """Packs a request. Free blocks are needed only to copy survivors out of blocks that others hold too."""

    def plan(self, table: TableView, pool: PoolView) -> ReclamationPlan | None:
        size = table.block_size
        num_live = table.num_live_tokens
        is_packed = table.cursor == num_live and len(table.block_ids) == cdiv(num_live, size)
        if table.plan_in_flight or is_packed:
            return None
        blocks = _sort_blocks(table, pool)
        fresh = pool.copy_targets(blocks.num_fresh) if blocks.num_fresh else []
        if fresh is None:
            return None  # copy-on-write waits for a free block
        pairs = zip(_movers(table, blocks), _holes(table, blocks, fresh), strict=True)
        return ReclamationPlan(
            req_id=table.req_id,
            layout_version=table.layout_version,
            liveness_version=table.liveness_version,
            num_live_tokens=num_live,
            moves=tuple(Move(position, src, dst) for (position, src), dst in pairs),
            freed_block_ids=tuple(table.block_ids[index] for index in blocks.left),
            new_block_ids=tuple(fresh),
            packed=True,
        )


def _sort_blocks(table: HeldBlocks, pool: PoolView) -> _Sorted:
    size = table.block_size
    counts = [word.bit_count() for word in table.live_words]
    others = pool.not_private(table.block_ids)
    staying = [index for index in others if counts[index] == size]
    left = [index for index in others if counts[index] != size]
    kept = sorted(set(range(len(counts))).difference(others)) if others else list(range(len(counts)))
    num_live = table.num_live_tokens - len(staying) * size
    needed = cdiv(num_live, size)
    if needed < len(kept):
        by_fullness = sorted(kept, key=counts.__getitem__, reverse=True)  # stable: the earlier of equals first
        kept, left = sorted(by_fullness[:needed]), sorted([*left, *by_fullness[needed:]])
    if num_live % size and len(kept) == needed and staying and kept[-1] < staying[-1]:
        left = sorted([*left, kept.pop()])  # only the last block may be partly filled: a fresh one takes its part
    return _Sorted(kept, left, needed - len(kept), num_live)


def _movers(table: TableView, blocks: _Sorted) -> Iterator[tuple[Position, SlotId]]:
    """Live tokens behind the first ``num_live`` slots of the kept blocks, in physical order."""
    rest, tail, words = blocks.num_live % table.block_size, _tail(table, blocks), table.live_words
    for index in blocks.left if tail is None else sorted([*blocks.left, tail]):
        yield from tokens_in(table, index, words[index] >> rest << rest if index == tail else words[index])


def _holes(table: TableView, blocks: _Sorted, fresh: Sequence[BlockId]) -> Iterator[SlotId]:
    """Pool slots to fill: the holes among the first ``num_live`` slots of kept and fresh blocks, in order."""
    size, words, block_ids = table.block_size, table.live_words, table.block_ids
    full, tail = (1 << size) - 1, _tail(table, blocks)
    for index in blocks.kept:
        holes = full & ~words[index]
        if index == tail:
            holes &= (1 << blocks.num_live % size) - 1
        if holes:
            yield from set_bits(holes, block_ids[index] * size)
    fresh_slots = (slot for block in fresh for slot in range(block * size, (block + 1) * size))
    yield from islice(fresh_slots, max(0, blocks.num_live - len(blocks.kept) * size))


def _tail(table: TableView, blocks: _Sorted) -> int | None:
    """The kept block that is partly filled afterwards, if there is one."""
    has_tail = blocks.num_live % table.block_size and not blocks.num_fresh
    return blocks.kept[-1] if has_tail else None
