"""Free list, reference counts and fences of the physical blocks (SPEC R-7, INV-6)."""

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence

from vtoken.errors import PoolExhausted, SpecError
from vtoken.types import NULL_BLOCK_ID, BlockId

__all__ = ["BlockPool"]


class BlockPool:
    """All blocks but the null block: each is free, held by ``ref_cnt`` tables, or in flight behind a fence.

    First freed, first taken, as in vLLM, so that a cached block lives as long as it can.
    A fence is a step number: the block comes back at a ``reap`` of that step or a later one.
    """

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 2:
            raise SpecError(f"num_blocks={num_blocks}: give at least 2, since block {NULL_BLOCK_ID} is the null block")
        self.num_blocks = num_blocks
        self._free = OrderedDict.fromkeys(range(1, num_blocks))
        self._ref_cnt: Counter[BlockId] = Counter()
        self._num_holders = 0  # the sum of all reference counts
        self._fences: OrderedDict[BlockId, int] = OrderedDict()
        self._freed_in_pass: set[BlockId] = set()
        self._hashed: set[BlockId] = set()

    # -- reading -----------------------------------------------------------------------------------------------------

    @property
    def num_free(self) -> int:
        """Blocks that may be allocated now."""
        return len(self._free)

    @property
    def num_in_flight(self) -> int:
        """Blocks in no table but fenced."""
        return len(self._fences)

    @property
    def num_held(self) -> int:
        """Distinct blocks in tables."""
        return len(self._ref_cnt)

    @property
    def free_share(self) -> float:
        """Free blocks over all blocks but the null block."""
        return len(self._free) / (self.num_blocks - 1)

    def ref_cnt(self, block_id: BlockId) -> int:
        """Tables that hold a block."""
        return self._ref_cnt[block_id]

    def is_private(self, block_id: BlockId) -> bool:
        """Held once and not hashed for the prefix cache (INV-7: only such a block is ever written)."""
        return self._ref_cnt.get(block_id) == 1 and block_id not in self._hashed

    def not_private(self, block_ids: Sequence[BlockId]) -> list[int]:
        """Indices into ``block_ids`` of blocks that are not private, ascending; O(1) where none is shared or hashed."""
        if self._num_holders == len(self._ref_cnt) and not self._hashed:
            return []
        return [index for index, block in enumerate(block_ids) if not self.is_private(block)]

    def free_block_ids(self) -> list[BlockId]:
        """The free list, next to be taken first."""
        return list(self._free)

    def fenced_block_ids(self) -> list[BlockId]:
        """Blocks behind a fence, oldest first."""
        return list(self._fences)

    def copy_targets(self, count: int) -> list[BlockId] | None:
        """``count`` free blocks that copies may go into: none freed in this pass (INV-5). None if there are fewer."""
        targets: list[BlockId] = []
        for block in self._free:
            if len(targets) == count:
                break
            if block not in self._freed_in_pass:
                targets.append(block)
        return targets if len(targets) == count else None

    # -- writing -----------------------------------------------------------------------------------------------------

    def allocate(self, count: int) -> list[BlockId]:
        """Takes ``count`` blocks off the free list, or raises PoolExhausted and takes none."""
        if count > len(self._free):
            raise PoolExhausted(
                f"{count} blocks are needed, {len(self._free)} of {self.num_blocks - 1} are free "
                f"({len(self._fences)} in flight): reclaim, wait for fences, or preempt a request"
            )
        blocks = [self._free.popitem(last=False)[0] for _ in range(count)]
        self._add_holder(blocks)
        return blocks

    def take(self, block_ids: Sequence[BlockId]) -> None:
        """Takes these blocks (copy targets, a plan's new ones) off the free list: all, or none with an error."""
        self.check_take(block_ids)
        for block in block_ids:
            del self._free[block]
        self._add_holder(block_ids)

    def check_take(self, block_ids: Sequence[BlockId]) -> None:
        """Raises where ``take`` would, and changes nothing."""
        refused = [block for block in block_ids if block not in self._free or block in self._freed_in_pass]
        if refused or len(set(block_ids)) != len(block_ids):
            raise SpecError(
                f"take: blocks {refused or list(block_ids)} are not free, were freed in this pass, or are named twice: "
                "plan again"
            )

    def share(self, block_ids: Sequence[BlockId]) -> None:
        """Adds one holder to blocks that are held already."""
        self._check_held(block_ids, "share")
        self._add_holder(block_ids)

    def free(self, block_ids: Sequence[BlockId], fence: int | None = None) -> list[BlockId]:
        """Drops one holder of each block; returns those that became free at once.

        With a fence, blocks without a holder wait for ``reap``. In regime ``ordered`` they are free at once, but are
        no copy target before the next pass.
        """
        self._check_held(block_ids, "free")
        self._num_holders -= len(block_ids)
        freed = []
        for block in block_ids:
            self._ref_cnt[block] -= 1
            if self._ref_cnt[block]:
                continue
            del self._ref_cnt[block]
            self._hashed.discard(block)
            if fence is None:
                self._free[block] = None
                self._freed_in_pass.add(block)
                freed.append(block)
            else:
                self._fences[block] = fence
        return freed

    def reap(self, step: int) -> list[BlockId]:
        """Moves blocks whose fence is at or before ``step`` to the free list; returns them."""
        passed = [block for block, fence in self._fences.items() if fence <= step]
        for block in passed:
            del self._fences[block]
            self._free[block] = None
        return passed

    def begin_pass(self) -> None:
        """A new scheduling pass: blocks freed in the last one may be copy targets now."""
        self._freed_in_pass.clear()

    def set_hashed(self, block_id: BlockId, hashed: bool) -> None:
        """Says whether the prefix cache may serve this block's content; a hashed block is never written."""
        self._check_held((block_id,), "set_hashed")
        (self._hashed.add if hashed else self._hashed.discard)(block_id)

    def _add_holder(self, block_ids: Sequence[BlockId]) -> None:
        self._ref_cnt.update(block_ids)
        self._num_holders += len(block_ids)

    def _check_held(self, block_ids: Iterable[BlockId], call: str) -> None:
        for block, count in Counter(block_ids).items():
            if count > self.ref_cnt(block):
                raise SpecError(f"{call}: block {block} is held by {self.ref_cnt(block)} tables, not {count}")
