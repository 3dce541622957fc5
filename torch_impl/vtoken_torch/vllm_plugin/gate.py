"""What vLLM asks before it lets a request in, or gives it a chunk: answered for live tokens (SPEC M-2, M-5).

vLLM counts a request's whole prompt. Here it counts what the request keeps, so that what will be evicted on the way
holds nobody back; beside it the blocks that running requests are still going to take, so that nobody is let in only to
be preempted.
"""

from collections.abc import Callable, Sequence
from typing import Any

from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.request import Request

from vtoken.config import VTokenConfig
from vtoken.types import ReqId, cdiv
from vtoken_torch.vllm_plugin.capacity import Capacity, LiveBound
from vtoken_torch.vllm_plugin.kv_spec import EvictingManager

__all__ = ["Gate"]


class Gate:
    """Asked by ``VTokenScheduler`` and ``EvictingManager``. Holds one bound for each request."""

    def __init__(
        self, scheduler: Any, manager: EvictingManager, capacity: Capacity, config_of: Callable[[ReqId], VTokenConfig]
    ) -> None:
        """``config_of``: a request's configuration as it stands; it changes when a policy fails."""
        self.capacity = capacity
        self.headroom = capacity.headroom
        self._scheduler = scheduler
        self._manager = manager
        self._config_of = config_of
        self._bounds: dict[ReqId, LiveBound] = {}
        manager.live_bound = self.live_bound
        manager.num_promised = self.num_promised

    # -- one request -------------------------------------------------------------------------------------------------

    def forget(self, req_id: ReqId) -> None:
        """The request has ended."""
        self._bounds.pop(req_id, None)

    def live_bound(self, req_id: ReqId, num_tokens: int) -> int:
        """Most tokens that a request has live at once on its way to ``num_tokens``."""
        return self._bound(req_id).at(num_tokens)

    def refusal(self, request: Request) -> str | None:
        """Why the request never fits; None if it does."""
        prompt_len = request.num_prompt_tokens
        total_len = min(prompt_len + (request.max_tokens or 0), self.capacity.max_model_len)
        config = self._config_of(request.request_id)
        return self.capacity.policy_refusal(config) or self.capacity.refusal(config, prompt_len, total_len)

    # -- the pool ----------------------------------------------------------------------------------------------------

    def num_promised(self, but: ReqId | None = None) -> int:
        """Blocks that running requests still take for the tokens that they have; ``but``: one that is left out.

        The headroom is among them.
        """
        held, size = self._manager.req_to_blocks, self.capacity.block_size
        promised = self.headroom
        for request in self._scheduler.running:
            bound = self._bound(request.request_id)
            if bound.is_bounded and request.request_id != but:
                is_decode = request.num_computed_tokens >= request.num_tokens - 1
                num_live, num_held = bound.at(request.num_tokens, is_decode), len(held.get(request.request_id, ()))
                promised += max(0, cdiv(num_live, size) - num_held)
        return promised

    def can_start(self, request: Request, num_free: int) -> bool:
        """Whether vLLM would let the request in if so many blocks were free."""
        num_free -= self.num_promised()
        if self._needed(request, ()) <= num_free:
            return True
        hit = self._hit(request)
        return any(self._needed(request, hit[:count]) <= num_free for count in range(len(hit), 0, -1))

    def trimmed(self, request: Request, blocks: KVCacheBlocks, num_tokens: int) -> tuple[KVCacheBlocks, int]:
        """As much of a prefix hit as leaves room to start: cached blocks that nobody holds take free ones too.

        A request that evicts needs fewer blocks than its prompt has, so that a shorter hit may fit where a longer does
        not. Where none fits the hit stays whole, and the request waits.
        """
        hit = blocks.blocks[0]
        if not hit or not self._bound(request.request_id).is_bounded:
            return blocks, num_tokens
        manager = self._scheduler.kv_cache_manager
        free = self._num_free() - self.num_promised() - (manager.watermark_blocks if self._scheduler.running else 0)
        counts = range(len(hit), -1, -1)
        count = next((count for count in counts if self._needed(request, hit[:count]) <= free), len(hit))
        if count == len(hit):
            return blocks, num_tokens
        kept = count * self.capacity.block_size
        return manager.truncate_computed_blocks(blocks, kept), kept

    def least_chunk(self, req_id: ReqId, wanted: int) -> int:
        """What a running request must be given of the tokens that it asks for, lest it be preempted."""
        is_limited = wanted > 1 and self._bound(req_id).is_bounded
        return min(wanted, self.capacity.block_size) if is_limited else wanted

    def chunk(self, request: Request, num_computed: int, wanted: int) -> int:
        """Tokens to give a request that asks for ``wanted`` after its first ``num_computed``.

        The chunk of a request that evicts shrinks to what is free and not promised, so that it evicts between smaller
        chunks where vLLM would preempt. Without any room it asks for a block, for which vLLM preempts, unless results
        are on their way that may bring deaths.
        """
        req_id = request.request_id
        if wanted <= 1 or not self._bound(req_id).is_bounded:
            return wanted
        size, free = self.capacity.block_size, self._num_free() - self.num_promised(but=req_id)
        held = len(self._manager.req_to_blocks.get(req_id, ()))
        if held:
            room = (held + free) * size - num_computed + self._manager.num_evicted.get(req_id, 0)
        else:
            room = (free - _num_unheld(self._hit(request)[: num_computed // size])) * size
        if room > 0:
            return min(wanted, room)
        return 0 if request.num_in_flight_tokens else min(wanted, size)

    # -- parts -------------------------------------------------------------------------------------------------------

    def _bound(self, req_id: ReqId) -> LiveBound:
        config, bound = self._config_of(req_id), self._bounds.get(req_id)
        if bound is None or bound.config is not config:
            prompt_len = self._scheduler.requests[req_id].num_prompt_tokens
            bound = self._bounds[req_id] = self.capacity.bound(config, prompt_len)
        return bound

    def _needed(self, request: Request, hit: Sequence[KVCacheBlock]) -> int:
        """Free blocks that the request starts with, given these cached ones: what it keeps, or its first chunk."""
        size, bound = self.capacity.block_size, self._bound(request.request_id)
        chunk = min(request.num_tokens - len(hit) * size, size if bound.is_bounded else self.capacity.step_tokens)
        needed = max(cdiv(bound.at(request.num_tokens), size), len(hit) + cdiv(chunk, size))
        return needed - len(hit) + _num_unheld(hit)

    def _hit(self, request: Request) -> Sequence[KVCacheBlock]:
        found, _, _ = self._scheduler.kv_cache_manager.get_computed_blocks(request)
        blocks: Sequence[KVCacheBlock] = found.blocks[0]
        return blocks

    def _num_free(self) -> int:
        return int(self._manager.block_pool.get_num_free_blocks())


def _num_unheld(blocks: Sequence[KVCacheBlock]) -> int:
    """Cached blocks that would be taken off the free list."""
    return sum(block.ref_cnt == 0 for block in blocks)
