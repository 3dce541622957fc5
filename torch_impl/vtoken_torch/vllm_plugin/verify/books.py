"""vLLM's pool and block lists as the invariants read them, and blocks that are set aside."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

from vllm.v1.core.kv_cache_utils import KVCacheBlock

from vtoken.types import BlockId, ReqId

__all__ = ["PoolNow", "VllmBooks"]


@dataclass(frozen=True, slots=True)
class _Holder:
    block_ids: Sequence[BlockId]


class VllmBooks:
    """Reads what vLLM itself goes by: its free list, reference counts, hashes, and every list of held blocks.

    Attributes:
        aside: blocks whose books are broken. Each keeps one holder that never lets go, so that it is never handed out
            again: free + held + in flight + aside = all blocks but the null block.
    """

    def __init__(self, scheduler: Any) -> None:
        self._scheduler = scheduler
        self._ledger = scheduler.vtoken.ledger
        self._pool = scheduler.kv_cache_manager.block_pool
        self.aside: set[BlockId] = set()

    def now(self) -> "PoolNow":
        """The books at this moment: O(blocks)."""
        return PoolNow(self._pool, dict(self._holders()), self._ledger.pool.fenced_blocks(), self.aside)

    def set_aside(self, block_id: BlockId) -> bool:
        """Takes a block out of circulation; its holders give it up as they go. False if that changes nothing."""
        if block_id in self.aside or not 0 < block_id < len(self._pool.blocks):
            return False
        block = self._pool.blocks[block_id]
        self._pool.evict_blocks({block_id})
        if block.next_free_block is not None:
            self._pool.free_block_queue.remove(block)
        self.aside.add(block_id)
        now = self.now()
        block.ref_cnt = 1 + sum(held == block_id for held in chain(now.held(), now.fenced))
        return True

    def holders_of(self, block_id: BlockId) -> list[ReqId]:
        """Requests that hold a block."""
        return [req_id for req_id, holder in self._holders() if block_id in holder.block_ids]

    def distrust(self, req_ids: Iterable[ReqId]) -> None:
        """Nobody finds the content of these requests' own blocks by hash any more."""
        for req_id in req_ids:
            blocks = self._ledger.manager.req_to_blocks.get(req_id, ())
            self._pool.evict_blocks({block.block_id for block in blocks if block.ref_cnt == 1})

    def distrust_idle_cache(self) -> None:
        """The same for cached blocks that nobody holds: a copy that went astray may have hit them."""
        free = self._pool.free_block_queue.get_all_free_blocks()
        self._pool.evict_blocks({block.block_id for block in free if block.block_hash is not None})

    def _holders(self) -> Iterator[tuple[ReqId, _Holder]]:
        manager = self._ledger.manager
        for req_id, blocks in manager.req_to_blocks.items():
            yield req_id, _Holder([block.block_id for block in (*blocks, *manager.parked.get(req_id, ()))])


class PoolNow:
    """``PoolBooks`` of vLLM's pool. ``holders``: by request, what it holds; ``fenced``: blocks that wait for copies."""

    def __init__(
        self,
        pool: Any,
        holders: Mapping[ReqId, _Holder],
        fenced: Sequence[KVCacheBlock],
        aside: set[BlockId],
    ) -> None:
        self.holders = holders
        self.fenced = [block.block_id for block in fenced]
        self._pool = pool
        self._aside = aside

    @property
    def num_blocks(self) -> int:
        return int(self._pool.num_gpu_blocks)

    def held(self) -> Iterator[BlockId]:
        """The blocks of all requests, one after the other."""
        return chain.from_iterable(holder.block_ids for holder in self.holders.values())

    def ref_cnt(self, block_id: BlockId) -> int:
        """Holders among the requests: fences and blocks set aside count as one more each."""
        extra = self.fenced.count(block_id) + (block_id in self._aside)
        return int(self._pool.blocks[block_id].ref_cnt) - extra

    def block_hash(self, block_id: BlockId) -> object:
        """What the prefix cache finds the block by, or None."""
        return self._pool.blocks[block_id].block_hash

    def is_aside(self, block_id: BlockId) -> bool:
        return block_id in self._aside

    def is_private(self, block_id: BlockId) -> bool:
        block = self._pool.blocks[block_id]
        num_holders = block.ref_cnt - (block_id in self._aside)  # a fence counts: a copy may still read the block
        return bool(num_holders == 1 and block.block_hash is None and not block.is_null)

    def free_block_ids(self) -> list[BlockId]:
        return [block.block_id for block in self._pool.free_block_queue.get_all_free_blocks()]

    def fenced_block_ids(self) -> list[BlockId]:
        """Blocks in no table that wait for copies, and those that are set aside."""
        return sorted(self._aside.union(self.fenced).difference(self.held()))
