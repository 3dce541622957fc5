"""What copies cost: the bandwidth ceiling, token moves against it, and how much of a move hides behind matmuls."""

import time
from collections.abc import Callable
from functools import partial
from typing import Final

import torch
from torch import Tensor

from vtoken.executor import KVSpec
from vtoken_bench.gpu_check.ground import Ground
from vtoken_bench.gpu_check.on_device import copy_device, cuda_us, graphed, settle
from vtoken_bench.timing import Spread
from vtoken_torch.copy_engine.cuda import CUDACopyEngine
from vtoken_torch.copy_engine.indexed import IndexCopyEngine
from vtoken_torch.kernels.move import move_tokens
from vtoken_torch.kernels.planes import KVPlanes
from vtoken_torch.kv_cache import KVCache

__all__ = ["copy_ceiling", "time_moves", "time_overlap"]

_SHAPE: Final = "32 layers, 8 KV heads of 128, bfloat16"
_CEILING_BYTES: Final = 1 << 30
_NUM_LAUNCHES: Final = 16
_SLEEP_CYCLES: Final = 20_000_000
"""Ten milliseconds or so, in which the host enqueues all that is timed."""


def copy_ceiling(ground: Ground) -> float | None:
    """GB/s read and written by one large contiguous copy; None in a rehearsal."""
    size = 1 << 10 if ground.is_dry else _CEILING_BYTES
    source = torch.ones(size, dtype=torch.uint8, device=ground.device)
    target = torch.empty_like(source)
    took = ground.time({"copy, contiguous": lambda: target.copy_(source)}, cuda_us, num_bytes=2 * size, bytes=size)
    return 2 * size / took["copy, contiguous"].median / 1e3 if took else None


def time_moves(ground: Ground) -> None:
    """One launch and sixteen against PyTorch's indexing and a contiguous copy of as many bytes."""
    copy_ceiling(ground)
    cache = _cache(ground)
    planes = KVPlanes.of_cache(cache)
    for num_moves in (32,) if ground.is_dry else (64, 1024, 8192):
        src, dst = _plan(cache, num_moves)
        wanted = cache.bits[:, src.long()].clone()
        _moves(planes, src, dst, 1)
        if not ground.check(f"{num_moves} moves are right", torch.equal(cache.bits[:, dst.long()], wanted)):
            return
        num_bytes = 2 * num_moves * cache.spec.token_bytes
        flat = torch.empty(num_bytes // 2, dtype=torch.uint8, device=ground.device)
        other = torch.empty_like(flat)
        indexed = IndexCopyEngine(cache)
        count = torch.tensor([num_moves], dtype=torch.int32, device=ground.device)
        works: dict[str, Callable[[], object]] = {
            "move, 1 launch": partial(_moves, planes, src, dst, 1),
            f"move, {_NUM_LAUNCHES} launches": partial(_moves, planes, src, dst, _NUM_LAUNCHES),
            "move, PyTorch indexing": partial(indexed.move_planned, src, dst, count),
            "copy of as many bytes": partial(other.copy_, flat),
        }
        replays = {name: graphed(work, ground) for name, work in works.items()}
        took = ground.time(replays, cuda_us, num_bytes=num_bytes, moves=num_moves)
        if took:
            share = took["copy of as many bytes"].median / took["move, 1 launch"].median
            ground.figure("move's speed over a copy's", "ratio", Spread.of([share]), moves=num_moves)
        _time_host(ground, planes, src.tolist(), dst.tolist())


def _moves(planes: KVPlanes, src: Tensor, dst: Tensor, num_launches: int) -> None:
    """In this many launches of equal size."""
    size = len(src) // num_launches
    count = torch.full((1,), size, dtype=torch.int32, device=src.device)
    for first in range(0, len(src), size):
        move_tokens(planes, src[first : first + size], dst[first : first + size], count)


def _time_host(ground: Ground, planes: KVPlanes, src: list[int], dst: list[int]) -> None:
    """What one launch costs the host, INV-5 check and plan included."""
    device = copy_device(ground.device)
    engine = CUDACopyEngine(device, partial(move_tokens, planes))
    ground.time({"launch, host": lambda: engine.launch(src, dst)}, _idle_host_us, moves=len(src))
    settle(device)


def _idle_host_us(work: Callable[[], object]) -> float:
    torch.cuda.synchronize()
    start = time.perf_counter_ns()
    work()
    return (time.perf_counter_ns() - start) / 1e3


def time_overlap(ground: Ground) -> None:
    """Matmuls as wide as decode's and as prefill's, with moves beside them and between them."""
    cache = _cache(ground)
    mover = partial(move_tokens, KVPlanes.of_cache(cache))
    num_moves, width = (16, 8) if ground.is_dry else (4096, 14336)
    src, dst = (slots.tolist() for slots in _plan(cache, num_moves))
    device = copy_device(ground.device)
    own, ordered = (CUDACopyEngine(device, mover, own_stream=own_stream) for own_stream in (True, False))
    weight = torch.ones(width // 2 if ground.is_dry else 4096, width, dtype=torch.bfloat16, device=ground.device)
    for rows, num_matmuls in ((2, 1),) if ground.is_dry else ((64, 40), (4096, 3)):
        x = torch.ones(rows, len(weight), dtype=torch.bfloat16, device=ground.device)
        y = torch.empty(rows, width, dtype=torch.bfloat16, device=ground.device)

        def both(engine: CUDACopyEngine | None, times: int, x: Tensor = x, y: Tensor = y) -> None:
            if engine is not None:
                engine.launch(src, dst)
            for _ in range(times):
                torch.mm(x, weight, out=y)
            if engine is not None:
                engine.wait()
            settle(device)

        works: dict[str, Callable[[], object]] = {
            "matmuls alone": partial(both, None, num_matmuls),
            "moves alone": partial(both, own, 0),
            "both, own stream": partial(both, own, num_matmuls),
            "both, compute stream": partial(both, ordered, num_matmuls),
        }
        took = {
            name: us.median
            for name, us in ground.time(
                works, partial(cuda_us, sleep_cycles=_SLEEP_CYCLES), rows=rows, moves=num_moves
            ).items()
        }
        if took:
            hidden = took["matmuls alone"] + took["moves alone"] - took["both, own stream"]
            ground.figure("hidden share of moves", "ratio", Spread.of([hidden / took["moves alone"]]), rows=rows)


def _cache(ground: Ground) -> KVCache:
    """4 GiB of KV on a GPU."""
    num_layers, num_blocks, head_size = (1, 6, 16) if ground.is_dry else (32, 2049, 128)
    if not ground.is_dry:
        ground.notes.append(_SHAPE)
    spec = KVSpec(
        num_layers=num_layers,
        num_kv_heads=8,
        num_query_heads=8,
        head_size=head_size,
        dtype="bfloat16",
        block_size=16,
        num_blocks=num_blocks,
    )
    cache = KVCache(spec, torch.device(ground.device))
    cache.bits.random_()
    return cache


def _plan(cache: KVCache, num_moves: int) -> tuple[Tensor, Tensor]:
    """Scattered slots, none twice."""
    slots = torch.randperm(cache.spec.num_slots, generator=torch.Generator().manual_seed(5))
    src, dst = slots[: 2 * num_moves].to(cache.device, torch.int32).view(2, num_moves)
    return src, dst
