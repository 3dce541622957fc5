"""Planner ``fill`` (SPEC R-5): live tokens of the emptiest blocks go into the holes of the fuller ones.

"Two fingers", as in swap-remove: no fresh block, and the layout is packed afterwards, so that unmodified paged
kernels serve it. Order within a request changes, which attention does not see.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

from vtoken.reclamation.plan import PoolView, ReclamationPlan, TableView, tokens_in
from vtoken.types import BlockId, Move, Position, SlotId, cdiv, set_bits

__all__ = ["FillPlanner"]


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


def _sort_blocks(table: TableView, pool: PoolView) -> _Sorted:
    size, words = table.block_size, table.live_words
    full = (1 << size) - 1
    others = pool.not_private(table.block_ids)
    staying = [index for index in others if words[index] == full]
    left = [index for index in others if words[index] != full]
    private = sorted(set(range(len(words))).difference(others))
    num_live = table.num_live_tokens - len(staying) * size
    needed = cdiv(num_live, size)
    kept = private
    if needed < len(private):
        by_fullness = sorted(private, key=lambda index: -words[index].bit_count())
        kept, left = sorted(by_fullness[:needed]), sorted([*left, *by_fullness[needed:]])
    if num_live % size and len(kept) == needed and staying and kept[-1] < staying[-1]:
        left = sorted([*left, kept.pop()])  # only the last block may be partly filled: a fresh one takes its part
    return _Sorted(kept, left, needed - len(kept), num_live)


def _movers(table: TableView, blocks: _Sorted) -> Iterator[tuple[Position, SlotId]]:
    """Live tokens behind the first ``num_live`` slots of the kept blocks, in physical order."""
    size, words = table.block_size, table.live_words
    rest = blocks.num_live % size
    tail = blocks.kept[-1] if rest and not blocks.num_fresh and blocks.kept else None
    sources = blocks.left if tail is None else sorted([*blocks.left, tail])
    for index in sources:
        word = words[index] >> rest << rest if index == tail else words[index]
        yield from tokens_in(table, index, word)


def _holes(table: TableView, blocks: _Sorted, fresh: Sequence[BlockId]) -> Iterator[SlotId]:
    """Pool slots to fill: the holes among the first ``num_live`` slots of kept and fresh blocks, in order."""
    size, words, block_ids = table.block_size, table.live_words, table.block_ids
    full = (1 << size) - 1
    rest = blocks.num_live % size
    last_word = (1 << rest) - 1 if rest else full
    num_target_blocks = len(blocks.kept) + len(fresh)
    for rank, index in enumerate(blocks.kept):
        wanted = last_word if rank == num_target_blocks - 1 else full
        holes = wanted & ~words[index]
        if holes:
            yield from set_bits(holes, block_ids[index] * size)
    for rank, block in enumerate(fresh, start=len(blocks.kept)):
        count = rest or size if rank == num_target_blocks - 1 else size
        yield from islice(range(block * size, (block + 1) * size), count)
