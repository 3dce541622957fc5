"""Planes of random bits in every physical order of vLLM's KV cache."""

import torch
from torch import Tensor

LAYOUTS = ("LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC")
"""vLLM 0.32: layer, block, head, slot of a block, content (keys and values side by side)."""


def random_planes(
    order: str, dtype: torch.dtype, block_size: int, num_heads: int, content: int, *, num_layers: int = 3, seed: int = 0
) -> list[Tensor]:
    """Of each layer ``[7, block_size, num_heads, content]``, any bits: NaNs of every payload, denormals."""
    sizes = {"L": num_layers, "B": 7, "H": num_heads, "N": block_size, "C": content}
    shape = [sizes[axis] for axis in order]
    shape[-1] *= dtype.itemsize
    generator = torch.Generator().manual_seed(seed)
    memory = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator).view(dtype)
    return list(memory.permute(*(order.index(axis) for axis in "LBNHC")))


def raw(planes: list[Tensor] | tuple[Tensor, ...]) -> bytes:
    """All bytes, layer by layer."""
    return b"".join(plane.contiguous().view(torch.uint8).numpy().tobytes() for plane in planes)
