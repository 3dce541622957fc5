"""vLLM's block accounting with evicted tokens left out: a KV cache spec of our own brings a manager of our own.

vLLM counts logically (computed tokens). The manager subtracts a request's dead tokens where counts become slots, so
that positions, lengths, stop checks and chunking stay vLLM's. Importing this module registers the spec: unpickling one
in the engine's process is enough.
"""

from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, fields
from typing import Any, Self

from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry, register_kv_cache_spec
from vllm.v1.request import Request

from vtoken.types import ReqId, cdiv
from vtoken_torch.vllm_plugin.capacity import LiveBound
from vtoken_torch.vllm_plugin.options import PluginOptions

__all__ = ["EvictableSpec", "EvictingManager"]


class EvictingManager(FullAttentionManager):
    """Slots = logical tokens - dead tokens. ``num_evicted`` is written by the ledger, always before vLLM allocates.

    A request in ``recycling`` needs no block, and nothing of it may be hashed: its next token goes over a dead one.
    ``num_dead`` is another dict only where dead tokens keep their slots (lazy mode).
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.num_evicted: dict[ReqId, int] = {}
        self.num_dead = self.num_evicted
        self.recycling: Container[ReqId] = ()
        self._hashes_parts = self.block_pool.hash_block_size != self.block_size  # of a block that is not full yet
        self.live_bound: Callable[[ReqId, int], int] | None = None  # (request, its tokens) -> most that live at once
        self.num_promised: Callable[[], int] | None = None  # blocks that running requests are still going to take
        self.parked: dict[ReqId, list[KVCacheBlock]] = {}  # held, unused: what the variant ``naive`` could not free
        self.hold_back: Callable[[ReqId, Sequence[KVCacheBlock]], bool] | None = None  # whether a fence keeps them
        self.naive_blocks: Callable[[ReqId, int], int] | None = None  # (request, its tokens) -> blocks it must hold

    def get_num_blocks_to_allocate(
        self,
        request_id: str,
        num_tokens: int,
        new_computed_blocks: Sequence[KVCacheBlock],
        total_computed_tokens: int,
        num_local_computed_tokens: int,
        num_tokens_main_model: int,
        apply_admission_cap: bool = False,
        prefill_end: int = 0,
    ) -> int:
        """vLLM's count for the live tokens. The admission gate counts what will be evicted on the way."""
        if request_id in self.recycling:
            return 0
        dead = self.num_evicted.get(request_id, 0)
        if request_id in self.num_cached_block and not apply_admission_cap and self.naive_blocks is None:
            # vLLM's own answer for a running request, spelled out: it is asked for each of them in every step.
            num_missing: int = -((dead - num_tokens) // self.block_size) - len(self.req_to_blocks[request_id])
            return max(0, num_missing)
        if apply_admission_cap and self.live_bound is not None:
            num_tokens = min(num_tokens, self.live_bound(request_id, num_tokens) + dead)
        num_blocks: int = super().get_num_blocks_to_allocate(
            request_id,
            num_tokens - dead,
            new_computed_blocks,
            total_computed_tokens,
            num_local_computed_tokens,
            num_tokens_main_model - dead,
            apply_admission_cap,
            prefill_end,
        )
        if apply_admission_cap and self.num_promised is not None:
            num_blocks += self.num_promised()
        if self.naive_blocks is None or not dead:
            return num_blocks
        parked = len(self.parked.get(request_id, ()))
        held = len(self.req_to_blocks[request_id]) + parked
        return max(num_blocks - parked, self.naive_blocks(request_id, num_tokens) - held, 0)

    def allocate_new_blocks(self, request_id: str, num_tokens: int, num_tokens_main_model: int) -> list[KVCacheBlock]:
        """Blocks for the live tokens; parked ones go first."""
        if request_id in self.recycling:
            return []
        dead = self.num_evicted.get(request_id, 0)
        unparked: list[KVCacheBlock] = []
        blocks = self.req_to_blocks[request_id]
        has_room = len(blocks) * self.block_size >= num_tokens - dead
        if has_room and self.naive_blocks is None and request_id not in self._partial_hit_reqs:
            return []
        parked = self.parked.get(request_id, [])
        while parked and len(blocks) * self.block_size < num_tokens - dead:
            unparked.append(parked.pop())
            blocks.append(unparked[-1])
        new: list[KVCacheBlock] = super().allocate_new_blocks(
            request_id, num_tokens - dead, num_tokens_main_model - dead
        )
        if self.naive_blocks is not None and dead:
            missing = self.naive_blocks(request_id, num_tokens) - len(blocks) - len(parked)
            if missing > 0:
                self.parked.setdefault(request_id, parked).extend(self.block_pool.get_new_blocks(missing))
        return unparked + new

    def cache_blocks(
        self,
        request: Request,
        num_tokens: int,
        retention_interval: int | None = None,
        *,
        replay_boundaries: Sequence[int],
    ) -> None:
        """Hashes nothing once a token is dead: block i no longer holds the i-th block of tokens, nor its pure KV."""
        req_id = request.request_id
        if req_id in self.recycling:
            return
        is_pure = not self.num_dead.get(req_id, 0)
        has_more = self.num_cached_block.get(req_id, 0) < num_tokens // self.block_size or self._hashes_parts
        if is_pure and has_more:
            super().cache_blocks(request, num_tokens, retention_interval, replay_boundaries=replay_boundaries)

    def pop_blocks_for_free(self, request_id: str) -> list[KVCacheBlock]:
        """Finish, abort and preemption pass here; a request that is rebuilt starts from nothing (SPEC Q-4)."""
        self.num_evicted.pop(request_id, None)
        self.num_dead.pop(request_id, None)
        blocks: list[KVCacheBlock] = super().pop_blocks_for_free(request_id)
        blocks = blocks + self.parked.pop(request_id, [])
        return [] if self.hold_back is not None and self.hold_back(request_id, blocks) else blocks


KVCacheSpecRegistry._ensure_registered()  # vLLM's own first: it registers none of them into a list that is not empty


@register_kv_cache_spec(manager_class=EvictingManager, uniform_type_base_spec=FullAttentionSpec)
@dataclass(frozen=True, kw_only=True)
class EvictableSpec(FullAttentionSpec):
    """Full attention whose blocks an ``EvictingManager`` keeps."""

    @classmethod
    def wrap(cls, spec: FullAttentionSpec) -> Self:
        """The same layout under this type."""
        return cls(**{field.name: getattr(spec, field.name) for field in fields(spec) if field.init})

    def max_memory_usage_bytes(self, vllm_config: Any) -> int:
        """What one request of ``max_model_len`` needs, for vLLM's check at start: its live tokens, if they are bounded.

        A request whose own settings keep more is refused by itself (``capacity.py``).
        """
        whole: int = super().max_memory_usage_bytes(vllm_config)
        options = PluginOptions.from_additional_config(vllm_config.additional_config)
        if options is None:
            return whole
        longest = vllm_config.model_config.max_model_len
        live = LiveBound.of(options.config, longest, self.block_size, self.block_size, options.mass_every).at(longest)
        return min(whole, int(cdiv(live, self.block_size) * self.page_size_bytes))
