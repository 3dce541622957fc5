# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
"""The fingerprint of retained KV (SPEC H-1 to H-3) in one pass over a device's memory, both salts at once.

Weights are computed, not loaded: the kernel reads KV and nothing else. Sequences are summed by integer atomics, whose
order does not matter.
"""

from typing import Any, Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from vtoken.fingerprint import SALTS
from vtoken_torch.fingerprint import kv_fingerprints, sequence_sums
from vtoken_torch.kernels.aot_case import AOTCase
from vtoken_torch.kernels.planes import KVPlanes, RowLayout, constexprs
from vtoken_torch.kernels.rows import slot_offset, word_offset

__all__ = ["AOT_CASES", "fingerprint_kernel", "fingerprint_tokens", "fingerprint_tokens_reference"]

_MASK: Final = 0xFFFFFFFF
_TOKENS: Final = 4  # of one program
_TILE_WORDS: Final = 1024


@triton.jit
def _fmix32(value):
    value = (value ^ (value >> 16)) * 0x85EBCA6B
    value = (value ^ (value >> 13)) * 0xC2B2AE35
    return value ^ (value >> 16)


@triton.jit
def fingerprint_kernel(
    table,
    slots,
    positions,
    requests,
    tokens,
    sequences,
    num_tokens,
    num_planes,
    num_requests,
    stride_block,
    stride_slot,
    stride_run,
    block_size: tl.constexpr,
    num_runs: tl.constexpr,
    run: tl.constexpr,
    stride_unit: tl.constexpr,
    is_aligned: tl.constexpr,
    is_bytes: tl.constexpr,
    salt_0: tl.constexpr,
    salt_1: tl.constexpr,
    group: tl.constexpr,
    tile: tl.constexpr,
):
    """Program ``i`` takes ``group`` tokens through all planes."""
    index = tl.program_id(0) * group + tl.arange(0, group)
    is_token = index < num_tokens
    slot = tl.load(slots + index, mask=is_token, other=0).to(tl.int64)
    place = slot_offset(slot, stride_block, stride_slot, block_size, stride_unit)
    sum_0 = tl.zeros([group], tl.uint32)
    sum_1 = tl.zeros([group], tl.uint32)
    for plane in range(num_planes):
        address = tl.load(table + plane)
        base = address.to(tl.pointer_type(tl.uint8 if is_bytes else tl.uint16))
        if is_aligned:
            base = tl.multiple_of(base, 16)
        for start in tl.static_range(0, num_runs * run, tile):
            words = start + tl.arange(0, tile)
            offsets = word_offset(words, stride_run, num_runs, run, stride_unit)
            mask = is_token[:, None] & (words < num_runs * run)[None, :]
            data = tl.load(base + place[:, None] + offsets[None, :], mask=mask, other=0).to(tl.uint32)
            step = (plane * (num_runs * run) + words).to(tl.uint32) * 0x9E3779B9
            sum_0 += tl.sum(data * (_fmix32(step + salt_0) | 1)[None, :], 1)
            sum_1 += tl.sum(data * (_fmix32(step + salt_1) | 1)[None, :], 1)
    sum_0 = _fmix32(sum_0)
    sum_1 = _fmix32(sum_1)
    tl.store(tokens + index, sum_0.to(tl.int32, bitcast=True), mask=is_token)
    tl.store(tokens + num_tokens + index, sum_1.to(tl.int32, bitcast=True), mask=is_token)
    where = _fmix32(tl.load(positions + index, mask=is_token, other=0).to(tl.uint32) + 1)
    request = tl.load(requests + index, mask=is_token, other=0)
    part_0 = _fmix32(sum_0 ^ where).to(tl.int32, bitcast=True)
    part_1 = _fmix32(sum_1 ^ where).to(tl.int32, bitcast=True)
    tl.atomic_add(sequences + request, part_0, mask=is_token, sem="relaxed")
    tl.atomic_add(sequences + num_requests + request, part_1, mask=is_token, sem="relaxed")


def fingerprint_tokens(
    planes: KVPlanes, slots: Tensor, positions: Tensor, requests: Tensor, num_requests: int
) -> tuple[Tensor, Tensor]:
    """Fingerprints of tokens, and of the sequences that they make up. Waits for nothing.

    Args:
        planes: in canonical order: a layer's keys, its values, the next layer's keys.
        slots, positions, requests: of each token, in any order; ``[num_tokens]`` int32 or int64 on the device.
        num_requests: more than the highest of ``requests``.

    Returns:
        ``[2, num_tokens]`` and ``[2, num_requests]`` int64 in 0 .. 2**32 - 1, the first salt's row first. A request
        without tokens has 0.
    """
    device = planes.table.device
    tokens = torch.empty(2, len(slots), dtype=torch.int32, device=device)
    sequences = torch.zeros(2, num_requests, dtype=torch.int32, device=device)
    grid = (max(1, triton.cdiv(len(slots), _TOKENS)),)
    with torch.cuda.device_of(planes.table):  # type: ignore[no-untyped-call]
        fingerprint_kernel[grid](
            *(planes.table, slots, positions, requests, tokens, sequences),
            *(len(slots), len(planes.table), num_requests),
            **planes.arguments(_unit(planes.item_bytes)),
            **_tiling(planes.layout, planes.item_bytes),
            num_warps=4,
            enable_fp_fusion=True,
        )
    return tokens.to(torch.int64) & _MASK, sequences.to(torch.int64) & _MASK


def _unit(item_bytes: int) -> int:
    """Bytes of memory that make one 16-bit word: one-byte elements are zero-extended."""
    return min(item_bytes, 2)


def _tiling(layout: RowLayout, item_bytes: int) -> dict[str, int]:
    words = layout.num_runs * layout.run_bytes // _unit(item_bytes)
    return {
        "is_bytes": item_bytes == 1,
        "salt_0": SALTS[0],
        "salt_1": SALTS[1],
        "group": _TOKENS,
        "tile": min(triton.next_power_of_2(words), _TILE_WORDS),
    }


def fingerprint_tokens_reference(
    planes: KVPlanes, slots: Tensor, positions: Tensor, requests: Tensor, num_requests: int
) -> tuple[Tensor, Tensor]:
    """The same by ``vtoken_torch.fingerprint``, on a gathered copy."""
    size, index = planes.layout.block_size, slots.long()
    rows = [view[index // size, index % size].reshape(len(slots), -1) for view in planes.views]
    kv = torch.cat(rows, 1)
    tokens = kv_fingerprints(kv.view(torch.uint8).to(torch.int16) if planes.item_bytes == 1 else kv)
    sums = [sequence_sums(tokens[:, requests == each], positions[requests == each]) for each in range(num_requests)]
    return tokens, torch.stack(sums, 1) if sums else tokens.new_zeros(2, 0)


def _case(shape: str, num_runs: int, run_bytes: int, item_bytes: int, **expected: Any) -> AOTCase:
    layout = RowLayout(16, num_runs, run_bytes, 0, 0, 0)
    unit, is_aligned = _unit(item_bytes), layout.is_aligned
    pointers = {
        "table": "*i64",
        **dict.fromkeys(("slots", "positions", "requests", "tokens", "sequences"), "*i32"),
    }
    numbers = ("num_tokens", "num_planes", "num_requests", "stride_block", "stride_slot", "stride_run")
    return AOTCase(
        fingerprint_kernel,
        shape,
        pointers | dict.fromkeys(numbers, "i32"),
        constexprs(layout, unit, is_aligned) | _tiling(layout, item_bytes),
        tuple(pointers),
        wide_stores=False,  # eight bytes a token
        **expected,
    )


_EIGHT_HEADS: Final = _case("16-bit HND 8x256 B", 8, 256, 2)

AOT_CASES: Final = (
    _case("16-bit NHD 8x256 B", 1, 2048, 2),
    _EIGHT_HEADS,
    _case("32-bit NHD 8x512 B", 1, 4096, 4),
    _case("fp8 HND 8x128 B", 8, 128, 1),
    _case("16-bit row 384 B", 1, 384, 2),
    _case("16-bit odd row 90 B", 1, 90, 2, wide_loads=False, narrow_limit=None),
    _EIGHT_HEADS.control("alignment not declared", "narrow accesses", is_aligned=False, stride_unit=1),
)
