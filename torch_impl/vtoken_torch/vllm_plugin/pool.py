"""vLLM's block pool behind the spec's ``PoolView``, with the three writes that a plan needs."""

from collections.abc import Iterable, Sequence

from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import KVCacheBlock

from vtoken.types import BlockId

__all__ = ["VllmPool"]


class VllmPool:
    """Regime ``ordered``: freed blocks are free at once, but no copy target before the next pass (SPEC R-7).

    A hashed block with one holder counts as private: its hash is forgotten before it is written (INV-7), and kept if
    the block is merely given back.
    """

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._freed_in_pass: set[BlockId] = set()
        self.num_unhashed = 0

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
        """None: copies run on the compute stream, before anything else in the step."""
        return 0

    def blocks(self, block_ids: Iterable[BlockId]) -> list[KVCacheBlock]:
        """vLLM's records of these blocks."""
        known = self._pool.blocks
        return [known[block_id] for block_id in block_ids]

    def is_private(self, block_id: BlockId) -> bool:
        """Held once: it may be written (after its hash is forgotten), and freeing it frees memory."""
        block = self._pool.blocks[block_id]
        return bool(block.ref_cnt == 1 and not block.is_null)

    def not_private(self, block_ids: Sequence[BlockId]) -> list[int]:
        """Indices into ``block_ids`` of the blocks that are not private, ascending."""
        known = self._pool.blocks
        return [index for index, block_id in enumerate(block_ids) if known[block_id].ref_cnt != 1]

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
        self._freed_in_pass.clear()

    def take(self, block_ids: Sequence[BlockId]) -> None:
        """Takes free blocks off the list as copy targets; nobody finds them by hash any more."""
        self._pool.touch(self.blocks(block_ids))
        self._pool.evict_blocks(set(block_ids))

    def free(self, blocks: Sequence[KVCacheBlock]) -> None:
        """Drops one holder of each, in table order. Hashes stay: the content does too until somebody takes them."""
        self._pool.free_blocks(reversed(blocks))
        self._freed_in_pass.update(block.block_id for block in blocks if block.ref_cnt == 0)

    def forget_hashes(self, block_ids: Iterable[BlockId]) -> None:
        """Takes private blocks that are about to be written out of the prefix cache."""
        hashed = {block.block_id for block in self.blocks(block_ids) if block.block_hash is not None}
        if hashed:
            self._pool.evict_blocks(hashed)
            self.num_unhashed += len(hashed)
