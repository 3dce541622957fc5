"""transformers' Cache over a paged pool: the model hands over each layer's keys and values, they go into slots."""

from math import prod
from typing import Any

import torch
from torch import Tensor
from transformers import Cache

from vtoken_torch.kv_cache import KVCache

__all__ = ["PagedCache"]


class PagedCache(Cache):  # type: ignore[misc]  # transformers is not followed by the type checker
    """Writes a packed batch's KV. It knows no requests and no history: attention reads the pool itself.

    Attributes:
        layer_kv: of each layer a view ``[2 * num_slots * num_kv_heads, head_size]`` in the KV dtype, a row for each
            head of each slot: keys first, then values.
        dtype, num_kv_heads, head_size, block_size: of the KV.
        positions: ``[num_slots]`` int32 of the pool.
        slots: ``[num_tokens]`` int64, where the tokens of the step under way go; distinct.
    """

    def __init__(self, kv: KVCache) -> None:
        super().__init__(layers=[])
        spec, floats = kv.spec, kv.bits.view(kv.keys(0).dtype)
        self.dtype, self.positions = floats.dtype, kv.positions
        self.num_kv_heads, self.head_size, self.block_size = spec.num_kv_heads, spec.head_size, spec.block_size
        self.layer_kv = list(floats.view(spec.num_layers, -1, spec.head_size))
        self._planes = list(zip(floats[::2], floats[1::2], strict=True))
        self._row_size = floats.shape[2]
        self._scratch = floats.new_empty(0)
        self.slots = torch.empty(0, dtype=torch.int64, device=kv.device)

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Scatters ``[1, num_kv_heads, num_tokens, head_size]``, rotated, into the step's slots; or as many rows of one
        token each."""
        keys, values = self._planes[layer_idx]
        keys.index_copy_(0, self.slots, key_states.transpose(1, 2).reshape(-1, self._row_size))
        values.index_copy_(0, self.slots, value_states.transpose(1, 2).reshape(-1, self._row_size))
        return key_states, value_states

    def scratch(self, *shape: int) -> Tensor:
        """Memory in the KV dtype, of one layer at a time, the same in all steps.

        Fresh memory costs a page fault for every 4 KB.
        """
        size = prod(shape)
        if size > len(self._scratch):
            self._scratch = self._scratch.new_empty(2 * size)
        return self._scratch[:size].view(shape)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Of no meaning here: positions are always given."""
        return 0

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """Of no meaning here: no mask is made by transformers."""
        return query_length, 0
