"""transformers' Cache over a paged pool: the model hands over each layer's keys and values, they go into slots."""

from typing import Any

import torch
from torch import Tensor
from transformers import Cache

from vtoken_torch.kv_cache import KVCache

__all__ = ["PagedCache"]


class PagedCache(Cache):  # type: ignore[misc]  # transformers is not followed by the type checker
    """Writes a packed batch's KV. It knows no requests and no history: attention reads the pool itself.

    Attributes:
        layer_kv: of each layer a view ``[2, num_slots, num_kv_heads * head_size]`` in the KV dtype: keys, then values.
        slots: ``[num_tokens]`` int64, where the tokens of the step under way go; distinct.
    """

    def __init__(self, kv: KVCache) -> None:
        super().__init__(layers=[])
        floats = kv.bits.view(kv.keys(0).dtype)
        self.layer_kv = list(floats.view(kv.spec.num_layers, 2, *floats.shape[1:]))
        self._planes = [tuple(both) for both in self.layer_kv]
        self.slots = torch.empty(0, dtype=torch.int64, device=kv.device)

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Scatters ``[1, num_kv_heads, num_tokens, head_size]``, rotated, into the step's slots."""
        for plane, states in zip(self._planes[layer_idx], (key_states, value_states), strict=True):
            plane.index_copy_(0, self.slots, states[0].transpose(0, 1).flatten(1))
        return key_states, value_states

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Of no meaning here: positions are always given."""
        return 0

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """Of no meaning here: no mask is made by transformers."""
        return query_length, 0
