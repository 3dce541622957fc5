"""Token move and fingerprint, in every layout of vLLM's KV cache and every dtype, on random bits."""

from collections.abc import Sequence
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor

from vtoken import fingerprint as spec
from vtoken.errors import InvariantError
from vtoken_bench.gpu_check.ground import Ground
from vtoken_bench.gpu_check.on_device import copy_device
from vtoken_torch.copy_engine.cuda import CUDACopyEngine
from vtoken_torch.kernels import fingerprint, move
from vtoken_torch.kernels.planes import KVPlanes

__all__ = ["check_fingerprint", "check_move"]

_ORDERS: Final = ("LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC")
_DTYPES: Final = (torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn, torch.uint8)
_ROWS: Final = ((3, 64), (2, 20))  # heads and content: aligned to 16 bytes, and not in one-byte dtypes
_BLOCK_SIZE: Final = 16


def check_move(ground: Ground) -> None:
    """Every bit of the cache after a launch, garbage behind the plan's end; INV-5 refused before anything moves."""
    num_moves, num_blocks = (5, 3) if ground.is_dry else (400, 64)
    slots = torch.randperm(num_blocks * _BLOCK_SIZE - _BLOCK_SIZE, generator=_seeded()) + _BLOCK_SIZE
    plan = [slots[:num_moves], slots[num_moves : 2 * num_moves]]
    garbage = torch.full((5,), 2**30)
    src, dst = (torch.cat([part, garbage]).to(ground.device, torch.int32) for part in plan)
    count = torch.tensor([num_moves], dtype=torch.int32, device=ground.device)
    for order, dtype, views in _caches(ground, num_blocks):
        before = [_bits(view).cpu().clone() for view in views]
        move.move_tokens(KVPlanes.of(views), src, dst, count)
        wanted = [_moved(bits, *plan) for bits in before]
        same = all(torch.equal(_bits(view).cpu(), bits) for view, bits in zip(views, wanted, strict=True))
        ground.check(f"{order} {dtype} {views[0].shape[2:]}: moved bit for bit", same)
    _check_refusal(ground)


def _check_refusal(ground: Ground) -> None:
    views = _views("LBNHC", torch.bfloat16, 3, 2, 32, ground.device)
    before = [view.clone() for view in map(_bits, views)]
    engine = CUDACopyEngine(copy_device(ground.device), partial(move.move_tokens, KVPlanes.of(views)))
    for what, src, dst in (
        ("a slot read and written in one launch", [20, 21], [30, 20]),
        ("a slot written twice", [20, 21], [30, 30]),
    ):
        try:
            engine.launch(src, dst)
            refused = False
        except InvariantError:
            refused = True
        ground.check(f"INV-5: {what} is refused", refused)
    ground.check("INV-5: nothing was moved", all(map(torch.equal, map(_bits, views), before)))


def check_fingerprint(ground: Ground) -> None:
    """Tokens and sequences against vToken's own integers in plain Python."""
    num_tokens, num_blocks, num_requests = (3, 2, 2) if ground.is_dry else (24, 8, 3)
    chosen = torch.randperm(num_blocks * _BLOCK_SIZE, generator=_seeded())[:num_tokens]
    positions = torch.randperm(100_000, generator=_seeded())[:num_tokens]
    requests = torch.arange(num_tokens) % num_requests
    slots, at, of = (tensor.to(ground.device, torch.int32) for tensor in (chosen, positions, requests))
    for order, dtype, views in _caches(ground, num_blocks):
        tokens, sequences = fingerprint.fingerprint_tokens(KVPlanes.of(views), slots, at, of, num_requests)
        kv = [_canonical(views, slot) for slot in chosen.tolist()]
        what = f"{order} {dtype} {views[0].shape[2:]}"
        wanted = [spec.token_fingerprint(each) for each in kv]
        ground.check(f"{what}: tokens", list(zip(*tokens.tolist(), strict=True)) == wanted)
        members = list(zip(requests.tolist(), positions.tolist(), kv, strict=True))
        whole = [spec.sequence_fingerprint((p, k) for r, p, k in members if r == each) for each in range(num_requests)]
        got = [f"{high:08x}{low:08x}" for low, high in zip(*sequences.tolist(), strict=True)]
        ground.check(f"{what}: sequences", got == whole)


def _caches(ground: Ground, num_blocks: int) -> "list[tuple[str, torch.dtype, list[Tensor]]]":
    """All orders, dtypes and rows; one row for each in a rehearsal."""
    cases = [(order, dtype) for order in _ORDERS for dtype in _DTYPES]
    chosen = cases[::7] if ground.is_dry else cases
    return [
        (order, dtype, _views(order, dtype, num_blocks, *row, ground.device))
        for number, (order, dtype) in enumerate(chosen)
        for row in (_ROWS[number % 2 :][:1] if ground.is_dry else _ROWS)
    ]


def _views(order: str, dtype: torch.dtype, num_blocks: int, heads: int, content: int, device: str) -> list[Tensor]:
    """Of each layer ``[num_blocks, 16, heads, content]``, any bits."""
    sizes = {"L": 3, "B": num_blocks, "H": heads, "N": _BLOCK_SIZE, "C": content * dtype.itemsize}
    memory = torch.randint(0, 256, [sizes[axis] for axis in order], dtype=torch.uint8, generator=_seeded())
    return list(memory.to(device).view(dtype).permute(*(order.index(axis) for axis in "LBNHC")))


def _bits(view: Tensor) -> Tensor:
    return view.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[view.element_size()])


def _moved(bits: Tensor, src: Tensor, dst: Tensor) -> Tensor:
    after = bits.clone()
    after[dst // _BLOCK_SIZE, dst % _BLOCK_SIZE] = bits[src // _BLOCK_SIZE, src % _BLOCK_SIZE]
    return after


def _canonical(views: Sequence[Tensor], slot: int) -> bytes:
    """One token's bytes as the spec takes them: elements of one byte are zero-extended."""
    rows = [_bits(view)[slot // _BLOCK_SIZE, slot % _BLOCK_SIZE].reshape(-1).cpu() for view in views]
    kv = torch.cat(rows)
    wide: Any = kv.to(torch.int16) if kv.element_size() == 1 else kv
    return bytes(wide.numpy().tobytes())


def _seeded() -> torch.Generator:
    return torch.Generator().manual_seed(4)
