# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
"""Where a token's words lie in a plane, for kernels that go through whole rows. Arguments as ``KVPlanes.arguments``."""

import triton
import triton.language as tl

__all__ = ["slot_offset", "word_offset"]


@triton.jit
def slot_offset(slot, stride_block, stride_slot, block_size: tl.constexpr, stride_unit: tl.constexpr):
    """Of int64 slots, in words from the plane's beginning."""
    return (slot // block_size * stride_block + slot % block_size * stride_slot) * stride_unit


@triton.jit
def word_offset(words, stride_run, num_runs: tl.constexpr, run: tl.constexpr, stride_unit: tl.constexpr):
    """Of words of a row, in words from the slot's beginning, int64: runs may lie apart."""
    if num_runs == 1:
        offsets = words.to(tl.int64)
    else:
        offsets = (words // run).to(tl.int64) * stride_run * stride_unit + words % run
    return offsets
