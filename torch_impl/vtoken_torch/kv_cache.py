"""Where KV lies: the one place that says the layout.

``bits`` is ``[num_planes, num_slots, row_elements]``. A plane is one layer's keys or values; plane ``2 * layer`` holds
keys, ``2 * layer + 1`` values; a row is one token's ``num_kv_heads * head_size`` elements. The planes of one token, in
order, are its canonical bytes: layer, K then V, head, dim.

Storage is an integer of the element's width. Float copies may quieten a NaN or flush a denormal, integer copies not.
"""

from typing import Final

import torch
from torch import Tensor

from vtoken.executor import KVSpec

__all__ = ["UNWRITTEN_POSITION", "KVCache"]

_FLOATS: Final = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_BITS: Final = {2: torch.int16, 4: torch.int32}

UNWRITTEN_POSITION: Final = torch.iinfo(torch.int32).min
"""Position of a slot that no token was ever written to; no computed token has it."""


class KVCache:
    """KV bits and one position for each slot. Unwritten slots hold NaN, so that a leak of them is seen.

    Attributes:
        bits: ``[num_planes, num_slots, row_elements]`` int16 or int32, contiguous.
        wide: the same memory in the widest integers that divide a row, for copies.
        positions: ``[num_slots]`` int32; a position travels with its token.
    """

    def __init__(self, spec: KVSpec, device: torch.device) -> None:
        self.spec = spec
        self.device = device
        shape = (spec.num_layers * 2, spec.num_slots, spec.num_kv_heads * spec.head_size)
        floats = torch.full(shape, torch.nan, dtype=_FLOATS[spec.dtype], device=device)
        self.bits = floats.view(_BITS[spec.item_bytes])
        self.wide = _widest(self.bits)
        self.positions = torch.full((spec.num_slots,), UNWRITTEN_POSITION, dtype=torch.int32, device=device)

    def keys(self, layer: int) -> Tensor:
        """A view of one layer's keys, ``[num_slots, num_kv_heads, head_size]`` in the KV dtype."""
        return self._heads(2 * layer)

    def values(self, layer: int) -> Tensor:
        """A view of one layer's values, ``[num_slots, num_kv_heads, head_size]`` in the KV dtype."""
        return self._heads(2 * layer + 1)

    def _heads(self, plane: int) -> Tensor:
        spec = self.spec
        return self.bits[plane].view(_FLOATS[spec.dtype]).view(spec.num_slots, spec.num_kv_heads, spec.head_size)


def _widest(bits: Tensor) -> Tensor:
    row_bytes = bits.shape[-1] * bits.element_size()
    for dtype in (torch.int64, torch.int32):
        if row_bytes % dtype.itemsize == 0:
            return bits.view(dtype)
    return bits
