"""Decode attention against the bandwidth ceiling and the stock kernels that are installed."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Final

import torch
from torch import Tensor

from vtoken.plugins import first_line
from vtoken.types import cdiv
from vtoken_bench.gpu_check.ground import Ground
from vtoken_bench.gpu_check.on_device import cuda_us, graphed
from vtoken_bench.gpu_check.stock_decode import GATHERED, STOCK, Dense, Layer
from vtoken_bench.gpu_check.time_moves import copy_ceiling
from vtoken_bench.timing import Spread
from vtoken_torch.kernels.decode import paged_decode, reference_decode, token_mass
from vtoken_torch.kernels.decode_workspace import DecodeWorkspace

__all__ = ["time_decode"]

_BLOCK_SIZE: Final = 16
_CASES: Final = ((1, 4096), (8, 4096), (32, 512), (32, 4096))  # requests, live tokens of each
_KV_BYTES: Final = 256 << 20
"""So many layers that no cache of the device holds them all."""
_OURS: Final = "decode"


def time_decode(ground: Ground) -> None:
    """All tokens alive, so that stock kernels do the same work; then every other token dead."""
    ceiling = copy_ceiling(ground)
    for num_reqs, length in ((2, 32),) if ground.is_dry else _CASES:
        dense = _make(ground, num_reqs, length)
        num_bytes = 2 * len(dense.keys) * num_reqs * length * dense.keys[0][0, 0].nbytes
        stock = _stock(ground, dense)
        words = torch.full_like(dense.table, 2**_BLOCK_SIZE - 1).unsqueeze(2)
        workspace = _workspace(dense)
        ours = partial(_decode, dense, words, workspace, None)
        if not _is_right(ground, _OURS, dense, lambda layer, ours=ours: ours()[layer]):  # type: ignore[misc]
            continue
        with_mass = partial(_decode_with_mass, dense, words, workspace)
        mine: dict[str, Callable[[], object]] = {_OURS: ours, f"{_OURS} with mass": with_mass}
        replays = {name: graphed(work, ground) for name, work in mine.items()} | stock
        params = {"reqs": num_reqs, "live": length, "layers": len(dense.keys)}
        took = ground.time(replays, cuda_us, num_bytes=num_bytes, **params)
        half = graphed(partial(_decode, dense, torch.full_like(words, 0x5555), workspace, None), ground)
        ground.time({f"{_OURS}, half dead": half}, cuda_us, **params)
        if took and ceiling is not None:
            _compare(ground, {name: us.median for name, us in took.items()}, num_bytes, ceiling, params)


def _compare(ground: Ground, took: dict[str, float], num_bytes: int, ceiling: float, params: dict[str, int]) -> None:
    ground.figure(
        "decode's rate over the copy's", "ratio", Spread.of([num_bytes / took[_OURS] / 1e3 / ceiling]), **params
    )
    best = min((name for name in took if name in STOCK), key=took.__getitem__, default=None)
    if best is not None:
        ratio = Spread.of([took[best] / took[_OURS]])
        ground.figure("decode's speed over the best stock kernel's", "ratio", ratio, stock=best, **params)


def _stock(ground: Ground, dense: Dense) -> dict[str, Callable[[], object]]:
    """Those that are installed, take this shape and give the right numbers; the others are noted with the reason."""
    works: dict[str, Callable[[], object]] = {}
    names = [GATHERED] if ground.is_dry else list(STOCK)
    if ground.is_dry:
        ground.notes.append(f"not rehearsed: {', '.join(name for name in STOCK if name != GATHERED)}")
    for name in names:
        try:
            layer = STOCK[name](dense)
            wrong = _error(dense, layer(0), 0)
            replay = graphed(partial(_all_layers, layer, len(dense.keys)), ground)
        except (Exception, SystemExit) as error:  # a stranger's kernel may raise anything, and is not under test
            note = f"without {name}: {type(error).__name__}: {first_line(error)}"
        else:
            note = f"without {name}: wrong by {wrong:.1e}"
            if wrong <= 2**-7:
                works[name] = replay
                continue
        if note not in ground.notes:
            ground.notes.append(note)
    return works


def _all_layers(layer: Layer, num_layers: int) -> None:
    for number in range(num_layers):
        layer(number)


def _make(ground: Ground, num_reqs: int, length: int) -> Dense:
    heads, head_size = ((2, 1), 16) if ground.is_dry else ((32, 8), 128)
    max_blocks = length // _BLOCK_SIZE
    shape = (num_reqs * max_blocks + 1, _BLOCK_SIZE, heads[1], head_size)
    plane_bytes = 2 * shape[0] * shape[1] * shape[2] * shape[3]
    num_layers = 1 if ground.is_dry else cdiv(_KV_BYTES, 2 * plane_bytes)
    generator = torch.Generator(ground.device).manual_seed(6)

    def normal(*sizes: int) -> Tensor:
        return torch.randn(*sizes, generator=generator, device=ground.device, dtype=torch.bfloat16)

    blocks = torch.randperm(shape[0] - 1, generator=generator, device=ground.device) + 1
    return Dense(
        normal(num_reqs, heads[0], head_size),
        [normal(*shape) for _ in range(num_layers)],
        [normal(*shape) for _ in range(num_layers)],
        blocks.view(num_reqs, max_blocks).to(torch.int32),
        torch.full((num_reqs,), length, dtype=torch.int32, device=ground.device),
        torch.full((num_reqs,), max_blocks, dtype=torch.int32, device=ground.device),
        length,
    )


def _workspace(dense: Dense) -> DecodeWorkspace:
    num_reqs, num_query_heads, head_size = dense.q.shape
    num_kv_heads = dense.keys[0].shape[2]
    return DecodeWorkspace(
        num_reqs, num_query_heads, num_kv_heads, head_size, dense.length, dense.q.device, with_logits=True
    )


def _decode(dense: Dense, words: Tensor, workspace: DecodeWorkspace, logits: Tensor | None) -> list[Tensor]:
    """All layers."""
    outputs = []
    for keys, values in zip(dense.keys, dense.values, strict=True):
        out = torch.empty_like(dense.q)
        paged_decode(
            dense.q, keys, values, dense.table, dense.num_blocks, words,
            scale=dense.scale, out=out, workspace=workspace, logits=logits,
        )  # fmt: skip
        outputs.append(out)
    return outputs


def _decode_with_mass(dense: Dense, words: Tensor, workspace: DecodeWorkspace) -> None:
    """Mass of every layer, so that its cost is seen at its highest."""
    mass = torch.zeros(len(dense.q), dense.length, device=dense.q.device)
    logits = workspace.logits
    for keys, values in zip(dense.keys, dense.values, strict=True):
        one = replace(dense, keys=[keys], values=[values])
        _decode(one, words, workspace, logits)
        if logits is not None:
            token_mass(logits, workspace.lse, dense.num_blocks, mass, block_size=_BLOCK_SIZE)


def _is_right(ground: Ground, name: str, dense: Dense, layer: Layer) -> bool:
    last = len(dense.keys) - 1
    error = _error(dense, layer(last), last)
    return ground.check(f"{name} of {len(dense.q)} x {dense.length} tokens", error <= 2**-7, f"{error:.1e}")


def _error(dense: Dense, got: Tensor, layer: int) -> float:
    """Largest difference over largest value."""
    words = torch.full_like(dense.table, 2**_BLOCK_SIZE - 1).unsqueeze(2)
    wanted, _, _ = reference_decode(
        dense.q, dense.keys[layer], dense.values[layer], dense.table, dense.num_blocks, words,
        scale=dense.scale, dtype=torch.float64,
    )  # fmt: skip
    error = ((got - wanted).abs().max() / wanted.abs().max()).item()
    return error if error == error else float("inf")
