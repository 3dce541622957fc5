"""Decode attention in Triton against float64: every dtype, layout and kind of shape, poison in all that is dead."""

from typing import Final, NamedTuple

import numpy as np
import torch
from torch import Tensor

from vtoken_bench.gpu_check.batch import Batch, Shape, make_batch
from vtoken_bench.gpu_check.ground import TOLERANCES, Ground
from vtoken_torch.kernels.decode import paged_decode, token_mass
from vtoken_torch.kernels.decode_workspace import DecodeWorkspace

__all__ = ["LAYOUTS", "Tensors", "check_decode", "decode", "to_device"]

LAYOUTS: Final = {  # axes of the memory; p keys or values, b block, n slot, h KV head, l layer of two, d head size
    "planes": "pbnhd",
    "LBNHC": "lbnhpd",
    "LBHNC": "lbhnpd",
    "LHBNC": "lhbnpd",
    "BLNHC": "blnhpd",
    "BLHNC": "blhnpd",
    "BHLNC": "bhlnpd",
}
"""vToken's own, and vLLM's six."""

_SHAPES: Final = (
    Shape(32, 8, 128, 16, 40),
    Shape(8, 1, 256, 64, 6),
    Shape(40, 2, 96, 128, 4),
    Shape(6, 6, 80, 32, 9),
    Shape(4, 4, 32, 16, 7),
)
_TINY: Final = (Shape(2, 1, 32, 16, 2), Shape(4, 2, 16, 64, 1))


class Tensors(NamedTuple):
    """Arguments of ``paged_decode``, in its order."""

    q: Tensor
    keys: Tensor
    values: Tensor
    block_table: Tensor
    num_blocks: Tensor
    live_words: Tensor


def check_decode(ground: Ground) -> None:
    """Output, lse and mass; with and without logits; twice the same bits."""
    shapes = _TINY if ground.is_dry else _SHAPES
    for number, shape in enumerate(shapes):
        for dtype in TOLERANCES:
            batch = make_batch(shape, dtype, seed=number)
            expected = batch.expected()
            every = 1 if number == 0 else 3
            layouts = list(LAYOUTS)[number :: 6 if ground.is_dry else every]
            for layout in layouts:  # each shape compiles anew, and layouts hardly do
                _check(ground, batch, dtype, layout, expected)
            _check_without_mass(ground, batch, dtype)


def _check(ground: Ground, batch: Batch, dtype: str, layout: str, expected: tuple[np.ndarray, ...]) -> None:
    tensors = to_device(batch, dtype, ground.device, layout)
    what = f"{batch.shape} {dtype} {layout}"
    out, lse, mass = decode(batch.shape, tensors, batch.scale)
    ground.close(f"{what}: output", out.numpy(), expected[0], dtype)
    ground.close(f"{what}: lse", lse.numpy(), expected[1], "float32")
    ground.close(f"{what}: mass", mass.numpy(), expected[2], "float32")


def _check_without_mass(ground: Ground, batch: Batch, dtype: str) -> None:
    tensors = to_device(batch, dtype, ground.device)
    out, _, _ = decode(batch.shape, tensors, batch.scale)
    again, _, _ = decode(batch.shape, tensors, batch.scale, with_mass=False)
    ground.check(f"{batch.shape} {dtype}: without mass, the same bits", torch.equal(out, again))


def to_device(batch: Batch, dtype: str, device: str, layout: str = "planes") -> Tensors:
    """Tensors of a batch; keys and values are views of one memory, NaN wherever they are not."""
    kind: torch.dtype = getattr(torch, dtype)
    axes = LAYOUTS[layout]
    sizes = dict(zip("pbnhd", batch.kv.shape, strict=True)) | {"l": 2}
    memory = torch.full([sizes[axis] for axis in axes], torch.nan, dtype=kind, device=device)
    canonical = memory.permute([axes.index(axis) for axis in sorted(axes, key="lpbnhd".index)])
    ours = canonical[-1] if "l" in axes else canonical
    ours.copy_(torch.from_numpy(batch.kv))
    tables = (batch.table, batch.num_blocks, batch.live_words)
    return Tensors(
        torch.from_numpy(batch.q).to(device, kind), ours[0], ours[1], *(torch.from_numpy(t).to(device) for t in tables)
    )


def decode(shape: Shape, tensors: Tensors, scale: float, *, with_mass: bool = True) -> tuple[Tensor, Tensor, Tensor]:
    """Output, lse and mass by the kernels, on the host; mass is zeros unless asked for."""
    num_reqs, device = len(tensors.q), tensors.q.device
    max_tokens = shape.max_blocks * shape.block_size
    workspace = DecodeWorkspace(
        num_reqs,
        shape.num_query_heads,
        shape.num_kv_heads,
        shape.head_size,
        max_tokens,
        device,
        with_logits=with_mass,
    )
    out = torch.full(tensors.q.shape, torch.nan, device=device)
    mass = torch.zeros(num_reqs, max_tokens, device=device)
    logits = workspace.logits
    paged_decode(*tensors, scale=scale, out=out, workspace=workspace, logits=logits)
    if logits is not None:
        token_mass(logits, workspace.lse, tensors.num_blocks, mass, block_size=shape.block_size)
    return out.cpu(), workspace.lse.cpu(), mass.cpu()
