"""Where a token's KV lies in vLLM's cache, and copies of single tokens.

On a GPU see ``device_layout.py``. The CPU's cache is ``[num_blocks, num_kv_heads, block_size, 2 * head_size]``. Within
one (block, head), K comes first, then V, each packed for the CPU's instructions (K by columns; tiles with AMX). The
packing is probed, not assumed: marked tokens are written with vLLM's own operator and looked up.
"""

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from vllm import _custom_ops as ops

from vtoken.errors import InvariantError
from vtoken.types import SlotId

__all__ = ["MovesTokens", "TokenMover", "probe_packing", "token_mover"]

_MARKS = 128  # marks 1 to 128 are exact in every dtype


class MovesTokens(Protocol):
    """Copies, reads and overwrites single tokens of vLLM's cache, in all layers.

    Attributes:
        num_moved_tokens: tokens copied so far.
    """

    num_moved_tokens: int

    @property
    def token_bytes(self) -> int:
        """Bytes of one token's KV in all layers, on this worker."""
        ...

    def move(self, src_slots: Sequence[SlotId], dst_slots: Sequence[SlotId]) -> None:
        """Copies token ``i`` from ``src_slots[i]`` to ``dst_slots[i]``, in the order of the current stream."""
        ...

    def move_planned(self, src: torch.Tensor, dst: torch.Tensor, count: torch.Tensor) -> None:
        """The same as a ``Mover`` of the copy engine: slots and their number are on the device."""
        ...

    def read(self, slots: Sequence[SlotId]) -> torch.Tensor:
        """KV of these slots in canonical order: ``[len(slots), num_layers, 2, num_kv_heads, head_size]``."""
        ...

    def fill(self, slots: Sequence[SlotId], word: int) -> None:
        """Overwrites the KV of these slots with one 16-bit pattern."""
        ...


def token_mover(layers: Sequence[Any]) -> MovesTokens:
    """The mover of a model's attention layers, whose caches are bound."""
    if layers[0].kv_cache.device.type == "cpu":
        return TokenMover.of_layers(layers)
    from vtoken_torch.vllm_plugin.device_layout import DeviceTokenMover  # needs Triton

    return DeviceTokenMover.of_layers(layers)


def probe_packing(isa: str, dtype: torch.dtype, block_size: int, head_size: int) -> torch.Tensor:
    """Offsets of each token's elements within one (block, head) region.

    Returns:
        ``[block_size, 2 * head_size]`` int64: K's ``head_size`` offsets, then V's, of every slot of a block.
    """
    half = block_size * head_size
    cache = torch.zeros(1, 1, block_size, 2 * head_size, dtype=dtype)
    keys, values = cache.view(1, 1, 2 * block_size, head_size).chunk(2, dim=2)
    offsets = torch.full((block_size, 2 * head_size), -1, dtype=torch.int64)
    for slot in range(block_size):
        for first in range(0, head_size, _MARKS):
            dims = torch.arange(first, min(first + _MARKS, head_size))
            token = torch.zeros(1, 1, head_size, dtype=dtype)
            token[..., dims] = (dims - first + 1).to(dtype)
            cache.zero_()
            ops.cpu_attn_reshape_and_cache(token, token.clone(), keys, values, torch.tensor([slot]), isa)
            marks = cache.view(2, half)
            for part in range(2):
                found = marks[part].nonzero().flatten()
                order = marks[part][found].long() - 1 + first + part * head_size
                offsets[slot, order] = found + part * half
    if not torch.equal(offsets.flatten().sort().values, torch.arange(2 * half)):
        raise InvariantError(f"packing of isa {isa!r}, {dtype}, block {block_size}, head {head_size} is no permutation")
    return offsets


class TokenMover:
    """Copies tokens between slots in all layers: every source is read before any destination is written."""

    def __init__(self, caches: Sequence[torch.Tensor], offsets: torch.Tensor) -> None:
        """``caches``: one a layer, as above; ``offsets``: of ``probe_packing``."""
        num_blocks, self._num_heads, self._block_size, width = caches[0].shape
        self._offsets = offsets
        self._flat = [cache.view(num_blocks, self._num_heads, self._block_size * width) for cache in caches]
        self.num_moved_tokens = 0

    @classmethod
    def of_layers(cls, layers: Sequence[Any]) -> "TokenMover":
        """The mover of a model's attention layers, which share one shape; layers that share a cache count once."""
        caches = list({layer.kv_cache.data_ptr(): layer.kv_cache for layer in layers}.values())
        isas = {layer.isa for layer in layers}
        shapes = {(cache.shape, cache.dtype) for cache in caches}
        if len(isas) != 1 or len(shapes) != 1:
            raise InvariantError(f"layers differ in their KV cache: isa {isas}, shapes and dtypes {shapes}")
        _, _, block_size, width = caches[0].shape
        return cls(caches, probe_packing(isas.pop(), caches[0].dtype, block_size, width // 2))

    def move(self, src_slots: Sequence[SlotId], dst_slots: Sequence[SlotId]) -> None:
        """Copies token ``i`` from ``src_slots[i]`` to ``dst_slots[i]``."""
        src, dst = self._index(src_slots), self._index(dst_slots)
        for flat in self._flat:
            flat[dst] = flat[src]  # the right side is a copy
        self.num_moved_tokens += len(src_slots)

    def move_planned(self, src: torch.Tensor, dst: torch.Tensor, count: torch.Tensor) -> None:
        """The same; ``count`` is the length of both."""
        self.move(src.tolist(), dst.tolist())

    def read(self, slots: Sequence[SlotId]) -> torch.Tensor:
        """KV of these slots in canonical order: ``[len(slots), num_layers, 2, num_kv_heads, head_size]``."""
        tokens = torch.stack([flat[self._index(slots)] for flat in self._flat], dim=1)  # [slots, layers, heads, 2 * D]
        return tokens.view(*tokens.shape[:3], 2, -1).transpose(2, 3)

    @property
    def token_bytes(self) -> int:
        """Bytes of one token's KV in all layers, on this worker."""
        return sum(self._num_heads * self._offsets.shape[1] * flat.element_size() for flat in self._flat)

    def fill(self, slots: Sequence[SlotId], word: int) -> None:
        """Overwrites the KV of these slots with one 16-bit pattern."""
        index = self._index(slots)
        for flat in self._flat:
            flat[index] = torch.full((flat.element_size() // 2,), word, dtype=torch.int16).view(flat.dtype)

    def _index(self, slots: Sequence[SlotId]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        slot = torch.tensor(slots, dtype=torch.int64)
        heads = torch.arange(self._num_heads)
        offsets = self._offsets[slot % self._block_size]
        return (slot // self._block_size)[:, None, None], heads[None, :, None], offsets[:, None, :]
