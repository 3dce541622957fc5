"""Tokens of vLLM's cache on a GPU: strides say where each lies, whatever the physical layout.

A layer's cache is ``[num_blocks, num_kv_heads, block_size, 2 * head_size]`` by its strides, K and V of a head side by
side, in all six layouts of vLLM 0.32.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from vtoken.errors import InvariantError
from vtoken.types import SlotId
from vtoken_torch.copy_engine import CUDACopyEngine
from vtoken_torch.copy_engine.device import CopyDevice, CUDADevice
from vtoken_torch.kernels.move import move_tokens
from vtoken_torch.kernels.planes import KVPlanes

__all__ = ["DeviceTokenMover"]


class DeviceTokenMover:
    """Copies with one launch for all layers; the plan goes up in a pinned buffer, nothing waits.

    Args:
        caches: one for each layer, as above, of one shape and stride.
        device: whose current stream ``move`` uses.
    """

    def __init__(self, caches: Sequence[Tensor], device: CopyDevice) -> None:
        self._views = [cache.transpose(1, 2) for cache in caches]  # [num_blocks, block_size, num_kv_heads, 2 * D]
        self._planes = KVPlanes.of(self._views)
        self._on_compute = CUDACopyEngine(device, self.move_planned, own_stream=False)
        self.num_moved_tokens = 0

    @classmethod
    def of_layers(cls, layers: Sequence[Any]) -> "DeviceTokenMover":
        """Of a model's attention layers; layers that share a cache count once."""
        caches = list({layer.kv_cache.data_ptr(): layer.kv_cache for layer in layers}.values())
        shapes = {(cache.shape, cache.stride(), cache.dtype) for cache in caches}
        if len(shapes) != 1:
            raise InvariantError(f"layers differ in their KV cache: shapes, strides and dtypes {shapes}")
        return cls(caches, CUDADevice(caches[0].device))

    @property
    def token_bytes(self) -> int:
        """Bytes of one token's KV in all layers, on this worker."""
        return len(self._views) * self._views[0][0, 0].numel() * self._views[0].element_size()

    def move(self, src_slots: Sequence[SlotId], dst_slots: Sequence[SlotId]) -> None:
        """Copies token ``i`` from ``src_slots[i]`` to ``dst_slots[i]``, on the current stream."""
        self._on_compute.launch(src_slots, dst_slots)

    def move_planned(self, src: Tensor, dst: Tensor, count: Tensor) -> None:
        """The same with slots and their number on the device."""
        move_tokens(self._planes, src, dst, count)
        self.num_moved_tokens += len(src)

    def read(self, slots: Sequence[SlotId]) -> Tensor:
        """KV of these slots in canonical order: ``[len(slots), num_layers, 2, num_kv_heads, head_size]``."""
        tokens = torch.stack([view[self._index(slots)] for view in self._views], dim=1)  # [slots, layers, heads, 2 * D]
        return tokens.view(*tokens.shape[:3], 2, -1).transpose(2, 3)

    def fill(self, slots: Sequence[SlotId], word: int) -> None:
        """Overwrites the KV of these slots with one 16-bit pattern."""
        for view in self._views:
            pattern = torch.full((view.element_size() // 2,), word, dtype=torch.int16, device=view.device)
            view[self._index(slots)] = pattern.view(view.dtype)

    def _index(self, slots: Sequence[SlotId]) -> tuple[Tensor, Tensor]:
        view = self._views[0]
        slot = torch.tensor(slots, dtype=torch.int64, device=view.device)
        return slot // view.shape[1], slot % view.shape[1]
