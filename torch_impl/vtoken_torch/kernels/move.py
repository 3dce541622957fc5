# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
"""Copies of whole tokens on the device: all layers and all requests in one launch.

Bytes, whatever the dtype. The count is read on the device and the grid does not depend on it, so that a launch can be
captured. A row is copied 16 bytes at a time where all addresses allow it. The pointers come out of a table, where the
compiler cannot see that: the host checks it and says so.
"""

from typing import Any, Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from vtoken_torch.kernels.aot_case import AOTCase
from vtoken_torch.kernels.planes import KVPlanes, RowLayout, constexprs
from vtoken_torch.kernels.rows import slot_offset, word_offset

__all__ = ["AOT_CASES", "move_kernel", "move_tokens", "move_tokens_reference"]

_TILE_WORDS: Final = 1024  # of one program at a time: 128 threads, 16 bytes twice
_MAX_PROGRAMS: Final = 256  # for each plane


@triton.jit
def move_kernel(
    table,
    src,
    dst,
    count,
    stride_block,
    stride_slot,
    stride_run,
    block_size: tl.constexpr,
    num_runs: tl.constexpr,
    run: tl.constexpr,
    stride_unit: tl.constexpr,
    is_aligned: tl.constexpr,
    group: tl.constexpr,
    tile: tl.constexpr,
):
    """Program ``(i, p)`` copies every ``num_programs``-th group of ``group`` tokens of plane ``p``."""
    num_moves = tl.load(count)
    address = tl.load(table + tl.program_id(1))
    if is_aligned:
        base = tl.multiple_of(address.to(tl.pointer_type(tl.int32)), 16)
    else:
        base = address.to(tl.pointer_type(tl.int8))
    for first in range(tl.program_id(0) * group, num_moves, tl.num_programs(0) * group):
        moves = first + tl.arange(0, group)
        is_move = moves < num_moves
        source = tl.load(src + moves, mask=is_move, other=0).to(tl.int64)
        target = tl.load(dst + moves, mask=is_move, other=0).to(tl.int64)
        source = slot_offset(source, stride_block, stride_slot, block_size, stride_unit)
        target = slot_offset(target, stride_block, stride_slot, block_size, stride_unit)
        for start in tl.static_range(0, num_runs * run, tile):
            words = start + tl.arange(0, tile)
            offsets = word_offset(words, stride_run, num_runs, run, stride_unit)
            mask = is_move[:, None] & (words < num_runs * run)[None, :]
            data = tl.load(base + source[:, None] + offsets[None, :], mask=mask)
            tl.store(base + target[:, None] + offsets[None, :], data, mask=mask)


def move_tokens(planes: KVPlanes, src: Tensor, dst: Tensor, count: Tensor, *, num_programs: int | None = None) -> None:
    """Enqueues the copies of token i from ``src[i]`` to ``dst[i]`` in all planes, on the current stream.

    Nobody can look at the slots without waiting for the device: INV-5 is checked where they are still on the host
    (``CUDACopyEngine.launch``), for the whole launch, copy-on-write copies included.

    Args:
        src, dst: int32 or int64 slots on the device; what follows the first ``count`` is not read.
        count: int32 ``[1]`` on the device, at most ``len(src)``.
        num_programs: for each plane; None: enough for ``len(src)`` moves.
    """
    tiling = _tiling(planes.layout, planes.is_aligned)
    programs = num_programs or max(1, min(triton.cdiv(len(src), tiling["group"]), _MAX_PROGRAMS))
    form = planes.arguments(_unit(planes.is_aligned))
    with torch.cuda.device_of(planes.table):  # type: ignore[no-untyped-call]
        move_kernel[programs, len(planes.table)](
            planes.table, src, dst, count, **form, **tiling, num_warps=4, enable_fp_fusion=True
        )


def _unit(is_aligned: bool) -> int:
    return 4 if is_aligned else 1


def _tiling(layout: RowLayout, is_aligned: bool) -> dict[str, int]:
    """Words of a row at a time, and tokens at a time: short rows share a program."""
    words = layout.num_runs * layout.run_bytes // _unit(is_aligned)
    tile = min(triton.next_power_of_2(words), _TILE_WORDS)
    return {"group": max(1, min(16, _TILE_WORDS // tile)), "tile": tile}


def move_tokens_reference(
    planes: KVPlanes, src: Tensor, dst: Tensor, count: Tensor, *, num_programs: int | None = None
) -> None:
    """The same with PyTorch's indexing. Reads all sources before it writes."""
    size = planes.layout.block_size
    source, target = (slots[: int(count)].long() for slots in (src, dst))
    for view in planes.views:
        bits = view.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[planes.item_bytes])
        bits[target // size, target % size] = bits[source // size, source % size]


def _case(shape: str, block_size: int, num_runs: int, run_bytes: int, **expected: Any) -> AOTCase:
    layout = RowLayout(block_size, num_runs, run_bytes, 0, 0, 0)
    form = constexprs(layout, _unit(layout.is_aligned), layout.is_aligned)
    signature = {"table": "*i64", "src": "*i32", "dst": "*i32", "count": "*i32"}
    strides = {"stride_block": "i32", "stride_slot": "i32", "stride_run": "i32"}
    limits = {"max_registers": 64, **expected}
    return AOTCase(
        move_kernel, shape, signature | strides, form | _tiling(layout, layout.is_aligned), tuple(signature), **limits
    )


_EIGHT_HEADS: Final = _case("HND 8x512 B BS16", 16, 8, 512)

AOT_CASES: Final = (
    _case("NHD 8x512 B BS16", 16, 1, 4096),
    _EIGHT_HEADS,
    _case("HND 8x256 B BS32", 32, 8, 256),
    _case("NHD 32x512 B BS16", 16, 1, 16384),
    _case("HND 32x512 B BS16", 16, 32, 512),
    _case("row 384 B BS16", 16, 1, 384),
    _case("odd row 100 B BS16", 16, 1, 100, wide_loads=False, wide_stores=False, narrow_limit=None),
    _EIGHT_HEADS.control("strides of 4 bytes", "128-bit stores", stride_unit=1),
    _EIGHT_HEADS.control("tile of 128 KiB", "spills", group=32),
)
