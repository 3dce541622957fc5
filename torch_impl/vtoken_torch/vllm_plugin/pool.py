"""vLLM's block pool behind the spec's ``PoolView``, with the three writes that a plan needs."""

from collections import Counter
from collections.abc import Iterable, Sequence

from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import KVCacheBlock

from vtoken.types import BlockId

__all__ = ["VllmPool"]


class VllmPool:
    """Regime ``ordered``: freed blocks are free at once, but no copy target before the next pass (SPEC R-7).

    Regime ``fenced`` (``is_fenced``): they wait until the copies of their pass are done. Until then the fence is one
    more holder, so that nobody writes what a copy may still read.

    A hashed block with one holder counts as private: its hash is forgotten before it is written (INV-7), and kept if
    the block is merely given back. With ``keeps_hashed`` it does not: what lives in it is copied out, and the block
    stays in the prefix cache.
    """

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self.is_fenced = False
        self.keeps_hashed = False
        self.pass_number = 0
        self._fences: dict[int, list[KVCacheBlock]] = {}  # by the pass whose copies they wait for
        self._freed_in_pass: set[BlockId] = set()
        self._read_in_pass: set[BlockId] = set()  # by copies of holders that have let go
        self.num_unhashed = 0
        self.num_copied = 0  # blocks taken to copy into

    # -- reading -----------------------------------------------------------------------------------------------------

    @property
    def num_blocks(self) -> int:
        """All blocks, the null block included."""
        return int(self._pool.num_gpu_blocks)

    @property
    def num_free(self) -> int:
        """Blocks that may be allocated now; cached ones without a holder are among them."""
        return int(self._pool.get_num_free_blocks())

    @property
    def num_in_flight(self) -> int:
        """Blocks in no table whose fence has not passed; none in regime ``ordered``."""
        if not self._fences:
            return 0
        waiting = Counter(block.block_id for blocks in self._fences.values() for block in blocks)
        return sum(self._pool.blocks[block_id].ref_cnt == count for block_id, count in waiting.items())

    def fenced_blocks(self) -> list[KVCacheBlock]:
        """Blocks that wait for a fence, one entry for each fence."""
        return [block for blocks in self._fences.values() for block in blocks]

    def blocks(self, block_ids: Iterable[BlockId]) -> list[KVCacheBlock]:
        """vLLM's records of these blocks."""
        known = self._pool.blocks
        return [known[block_id] for block_id in block_ids]

    def is_private(self, block_id: BlockId) -> bool:
        """Held once: it may be written (after its hash is forgotten), and freeing it frees memory."""
        block = self._pool.blocks[block_id]
        is_kept = self.keeps_hashed and block.block_hash is not None
        return self.is_held_once(block_id) and not (block.is_null or is_kept)

    def is_held_once(self, block_id: BlockId) -> bool:
        """Whether no other request holds the block, or did before this pass's copies; it may be in the prefix cache."""
        return bool(self._pool.blocks[block_id].ref_cnt == 1) and block_id not in self._read_in_pass

    def not_private(self, block_ids: Sequence[BlockId]) -> list[int]:
        """Indices into ``block_ids`` of the blocks that are not private, ascending."""
        if self.keeps_hashed or self._read_in_pass:
            return [index for index, block_id in enumerate(block_ids) if not self.is_private(block_id)]
        known = self._pool.blocks
        return [index for index, block_id in enumerate(block_ids) if known[block_id].ref_cnt != 1]

    def guarded(self, block_ids: Iterable[BlockId]) -> set[BlockId]:
        """Of these, the blocks that others hold, or may come to hold through the prefix cache."""
        blocks = self.blocks(block_ids)
        return {block.block_id for block in blocks if block.ref_cnt != 1 or block.block_hash is not None}

    def copy_targets(self, count: int) -> list[BlockId] | None:
        """``count`` free blocks, in the order in which vLLM would hand them out, or None."""
        targets: list[BlockId] = []
        block = self._pool.free_block_queue.fake_free_list_head.next_free_block
        while len(targets) < count and block is not None and block.next_free_block is not None:
            if block.block_id not in self._freed_in_pass:
                targets.append(block.block_id)
            block = block.next_free_block
        return targets if len(targets) == count else None

    @property
    def num_targets(self) -> int:
        """Free blocks that copies may go into."""
        return self.num_free - sum(1 for block in self.blocks(self._freed_in_pass) if block.ref_cnt == 0)

    # -- writing -----------------------------------------------------------------------------------------------------

    def begin_pass(self) -> None:
        """A new scheduling pass: what the last one freed may be a copy target now."""
        self.pass_number += 1
        self._freed_in_pass.clear()
        self._read_in_pass.clear()

    def copied_out_of(self, block_ids: Iterable[BlockId]) -> None:
        """Blocks that a holder left with copies: another one writes them no sooner than in the next pass (INV-5)."""
        self._read_in_pass.update(block_ids)

    def take(self, block_ids: Sequence[BlockId]) -> None:
        """Takes free blocks off the list as copy targets; nobody finds them by hash any more."""
        self._pool.touch(self.blocks(block_ids))
        self._pool.evict_blocks(set(block_ids))
        self.num_copied += len(block_ids)

    def free(self, blocks: Sequence[KVCacheBlock]) -> None:
        """Drops one holder of each, in table order. Hashes stay: the content does too until somebody takes them."""
        if self.is_fenced:
            self.fence(blocks, self.pass_number)
            return
        self._pool.free_blocks(reversed(blocks))
        self._freed_in_pass.update(block.block_id for block in blocks if block.ref_cnt == 0)

    def fence(self, blocks: Sequence[KVCacheBlock], number: int) -> None:
        """Their holder gives them up once the copies of pass ``number`` are done."""
        self._fences.setdefault(number, []).extend(blocks)

    def reap(self, number: int) -> None:
        """The copies of all passes up to ``number`` are done."""
        for passed in [each for each in self._fences if each <= number]:
            self._pool.free_blocks(reversed(self._fences.pop(passed)))

    def forget_hashes(self, block_ids: Iterable[BlockId]) -> None:
        """Takes private blocks that are about to be written out of the prefix cache."""
        hashed = {block.block_id for block in self.blocks(block_ids) if block.block_hash is not None}
        if hashed:
            self._pool.evict_blocks(hashed)
            self.num_unhashed += len(hashed)
