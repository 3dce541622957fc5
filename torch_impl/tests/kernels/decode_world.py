"""Small batches for decode attention in which everything that must not be read is poison, and what comes out of them.

The oracle is NumPy in float64, one query head at a time, over the live tokens alone; it knows no live words.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

GARBAGE_BLOCK = 2**30
PADDING, ALL_DEAD, ONE_TOKEN = 1, 2, 4  # rows of every batch


class Shape(NamedTuple):
    num_query_heads: int
    num_kv_heads: int
    head_size: int
    block_size: int
    max_blocks: int


@dataclass
class World:
    """A batch of five requests.

    0: every block of the table, the first 32 tokens dead; 1: padding, NaN query; 2: one block, no live token;
    3: fewer blocks, the first shared with request 0 under its own live words; 4: one live token, in the last slot.

    ``alive`` is ``[5, max_blocks, block_size]`` bool; ``rows`` what keys and values hold, ``[2, pool_blocks,
    block_size, num_kv_heads, head_size]`` float64.
    """

    shape: Shape
    q: Tensor
    keys: Tensor
    values: Tensor
    block_table: Tensor
    num_blocks: Tensor
    live_words: Tensor
    alive: np.ndarray
    rows: np.ndarray

    @property
    def scale(self) -> float:
        return float(self.shape.head_size**-0.5)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return self.q, self.keys, self.values, self.block_table, self.num_blocks, self.live_words


def make_world(shape: Shape, dtype: torch.dtype, layout: str, device: torch.device, seed: int) -> World:
    rng = np.random.default_rng(seed)
    num_query_heads, num_kv_heads, head_size, block_size, max_blocks = shape
    pool_blocks = 5 * max_blocks + 1
    num_blocks = np.array([max_blocks, 0, 1, rng.integers(1, max_blocks + 1), max_blocks])
    table = rng.permutation(np.arange(1, pool_blocks)).reshape(5, max_blocks)
    table[3, 0] = table[0, -1]

    alive = rng.random((5, max_blocks, block_size)) < 0.6
    alive[0].reshape(-1)[:32] = False
    alive[3, 0, :2] = True, False
    alive[0, -1, :3] = False, True, True
    alive[ALL_DEAD] = alive[ONE_TOKEN] = False
    alive[ONE_TOKEN, -1, -1] = True

    rows = rng.standard_normal((2, pool_blocks, block_size, num_kv_heads, head_size))
    stored = torch.from_numpy(rows).to(dtype)
    keys, values = place(stored, held_slots(table, num_blocks, alive), layout, device)
    past = np.arange(max_blocks) >= num_blocks[:, None]
    table[past] = GARBAGE_BLOCK
    q = torch.from_numpy(rng.standard_normal((5, num_query_heads, head_size)) * 3).to(dtype)
    q[PADDING] = torch.nan
    return World(
        shape,
        q.to(device),
        keys,
        values,
        integers(table, device),
        integers(num_blocks, device),
        integers(pack(alive, rng), device),
        alive & ~past[:, :, None],
        stored.double().numpy(),
    )


def held_slots(table: np.ndarray, num_blocks: np.ndarray, alive: np.ndarray) -> np.ndarray:
    """``[pool_blocks, block_size]`` bool: alive for one request at least."""
    held = np.zeros((table.size + 1, alive.shape[2]), dtype=bool)
    for blocks, count, slots in zip(table, num_blocks, alive, strict=True):
        for block, is_alive in zip(blocks[:count], slots, strict=False):
            held[block] |= is_alive
    return held


def integers(values: np.ndarray, device: torch.device) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(values, dtype=np.int32)).to(device)


def pack(alive: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Live words, with garbage in the bits past a block's slots."""
    spare = -alive.shape[2] % 32
    bits = np.concatenate([alive, rng.random((*alive.shape[:2], spare)) < 0.5], axis=2)
    return np.packbits(bits, axis=2, bitorder="little").view("<i4")


LAYOUTS = {
    # axes of the buffer; b block, n slot, h KV head, l layer (the second is ours), p keys or values, d head size
    "planes": "pbnhd",
    "NHD": "bnhpd",  # vLLM's LBNHC: layers are memories of their own
    "HND": "bhnpd",  # vLLM's LBHNC
    "LHBNC": "lhbnpd",
    "BLHNC": "blhnpd",
    "BLNHC": "blnhpd",
    "BHLNC": "bhlnpd",
    "keys NHD, values HND": None,
}


def place(stored: Tensor, held: np.ndarray, layout: str, device: torch.device) -> tuple[Tensor, Tensor]:
    """Keys and values as views of one NaN-filled buffer, or of two that differ."""
    dead = torch.from_numpy(~held)[:, :, None, None]
    keys, values = stored.masked_fill(dead, torch.nan).to(device)
    axes = LAYOUTS[layout]
    if axes is None:
        wide = torch.full((len(keys), keys.shape[2], keys.shape[1], keys.shape[3] + 5), torch.nan).to(keys)
        apart = wide[..., 5:].transpose(1, 2)
        apart.copy_(values)
        return keys, apart
    sizes = dict(zip("bnhd", keys.shape, strict=True)) | {"l": 2, "p": 2}
    buffer = torch.full([sizes[axis] for axis in axes], torch.nan).to(keys)
    canonical = buffer.permute([axes.index(axis) for axis in sorted(axes, key="lpbnhd".index)])
    ours = canonical[1] if "l" in axes else canonical
    ours[0].copy_(keys)
    ours[1].copy_(values)
    return ours[0], ours[1]


def oracle(world: World) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """``out`` and ``lse`` shaped as in ``paged_decode``, ``mass`` ``[5, max_tokens]``."""
    q, table = world.q.double().cpu().numpy(), world.block_table.cpu().numpy()
    group = world.shape.num_query_heads // world.shape.num_kv_heads
    out, lse = np.zeros(q.shape), np.full(q.shape[:2], -np.inf)
    mass = np.zeros(world.alive.shape)
    for req, head in np.ndindex(lse.shape):
        index, slot = np.nonzero(world.alive[req])
        if len(index):
            keys, values = world.rows[:, table[req, index], slot, head // group]
            logits = keys @ q[req, head] * world.scale
            weights = np.exp(logits - logits.max())
            lse[req, head] = logits.max() + np.log(weights.sum())
            weights /= weights.sum()
            out[req, head] = weights @ values
            mass[req, index, slot] += weights
    return out, lse, mass.reshape(len(mass), -1)


def worst(got: Any, expected: np.ndarray) -> float:
    """The largest difference, as a share of the largest value. NaN is infinitely wrong; -inf equals -inf alone."""
    got = got.double().cpu().numpy()
    finite = np.isfinite(expected)
    if not np.array_equal(got[~finite], expected[~finite]) or not np.isfinite(got[finite]).all():
        return np.inf
    return float(np.abs(got[finite] - expected[finite]).max() / np.abs(expected[finite]).max())
