"""Where KV lies, as the kernels are told: planes of one shape, and where a token's bytes are within each."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor

from vtoken.errors import SpecError
from vtoken_torch.kv_cache import KVCache

__all__ = ["KVPlanes", "RowLayout", "constexprs"]

WIDE_BYTES = 16
"""Of one access of global memory at its widest."""


@dataclass(frozen=True, slots=True)
class RowLayout:
    """One token in one plane: ``num_runs`` runs of ``run_bytes`` each. Strides are in bytes.

    Byte ``i`` of run ``h`` of slot ``s`` is at ``s // block_size * block_stride + s % block_size * slot_stride +
    h * run_stride + i``. A token whose heads are neighbours is one run.
    """

    block_size: int
    num_runs: int
    run_bytes: int
    block_stride: int
    slot_stride: int
    run_stride: int

    @property
    def is_aligned(self) -> bool:
        """All runs begin and end at multiples of 16 bytes, if the plane begins at one."""
        sizes = self.run_bytes | self.block_stride | self.slot_stride | self.run_stride
        return sizes % WIDE_BYTES == 0

    def strides(self, unit: int) -> tuple[int, int, int]:
        """Of block, slot and run, in units of that many bytes."""
        return self.block_stride // unit, self.slot_stride // unit, self.run_stride // unit


@dataclass(frozen=True, slots=True)
class KVPlanes:
    """Planes of one shape, dtype and stride each: one for each layer, or two (keys, values).

    Attributes:
        table: address of each plane, ``[num_planes]`` int64 on the device.
        layout: of a token in each of them.
        item_bytes: of an element.
        is_aligned: all runs of all planes begin and end at multiples of 16 bytes.
        views: the planes; they keep the memory alive.
    """

    table: Tensor
    layout: RowLayout
    item_bytes: int
    is_aligned: bool
    views: tuple[Tensor, ...]

    @classmethod
    def of(cls, views: Sequence[Tensor]) -> Self:
        """Of ``[num_blocks, block_size, num_heads, content]`` each; contiguous in content, else with any strides.

        All six layouts of vLLM's KV cache come in this form by a permutation; ``content`` is keys and values side by
        side, or one of them.

        Raises:
            SpecError: no view, views that differ, or content that is not contiguous.
        """
        if not views:
            raise SpecError("no KV plane: give one view for each layer at least")
        shapes = {(view.shape, view.stride(), view.dtype, view.device) for view in views}
        first = views[0]
        if len(shapes) != 1 or first.dim() != 4 or first.stride(3) != 1:
            raise SpecError(
                f"KV planes {sorted(map(str, shapes))}: give views [num_blocks, block_size, num_heads, content] of one "
                "shape, stride, dtype and device, contiguous in content"
            )
        layout = _layout(first)
        is_aligned = layout.is_aligned and all(view.data_ptr() % WIDE_BYTES == 0 for view in views)
        table = torch.tensor([view.data_ptr() for view in views], dtype=torch.int64, device=first.device)
        return cls(table, layout, first.element_size(), is_aligned, tuple(views))

    @classmethod
    def of_cache(cls, cache: KVCache) -> Self:
        """Of vToken's own cache, in canonical order."""
        num_planes, _, row = cache.bits.shape
        return cls.of(list(cache.bits.view(num_planes, -1, cache.spec.block_size, 1, row)))

    def distinct(self) -> "KVPlanes":
        """Each plane once: layers may share their KV."""
        return KVPlanes.of(list({view.data_ptr(): view for view in self.views}.values()))

    def arguments(self, unit: int) -> dict[str, Any]:
        """Strides and constexprs by which a kernel finds words of ``unit`` bytes."""
        stride_unit = WIDE_BYTES if self.is_aligned else unit
        names = ("stride_block", "stride_slot", "stride_run")
        return constexprs(self.layout, unit, self.is_aligned) | dict(
            zip(names, self.layout.strides(stride_unit), strict=True)
        )


def constexprs(layout: RowLayout, unit: int, is_aligned: bool) -> dict[str, Any]:
    """What a kernel that reads words of ``unit`` bytes is compiled for.

    Aligned strides are passed in units of 16 bytes, so that the compiler sees what they are multiples of.
    """
    return {
        "block_size": layout.block_size,
        "num_runs": layout.num_runs,
        "run": layout.run_bytes // unit,
        "stride_unit": WIDE_BYTES // unit if is_aligned else 1,
        "is_aligned": is_aligned,
    }


def _layout(view: Tensor) -> RowLayout:
    size = view.element_size()
    _, block_size, num_heads, content = view.shape
    block, slot, head = (view.stride(dim) * size for dim in range(3))
    if num_heads == 1 or head == content * size:
        return RowLayout(block_size, 1, num_heads * content * size, block, slot, 0)
    return RowLayout(block_size, num_heads, content * size, block, slot, head)
