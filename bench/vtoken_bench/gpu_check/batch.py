"""A batch for decode attention in which all that must not be read is poison, and what must come out, in float64.

NumPy alone, so that PyTorch and JAX are held to the same numbers. Values are float32 that the KV dtype holds exactly.
"""

from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

__all__ = ["Batch", "Shape", "make_batch"]

GARBAGE_BLOCK: Final = 2**30
_NUM_REQS: Final = 5


class Shape(NamedTuple):
    """Of one layer and its tables."""

    num_query_heads: int
    num_kv_heads: int
    head_size: int
    block_size: int
    max_blocks: int

    def __str__(self) -> str:
        return f"{self.num_query_heads}/{self.num_kv_heads} D{self.head_size} BS{self.block_size}"


@dataclass(frozen=True, slots=True)
class Batch:
    """Five requests. 0: the whole table; 1: padding, its query NaN; 2: no live token; 3: its first block is also
    request 0's last, under its own live words; 4: one live token, in the last slot.

    Attributes:
        q: ``[5, num_query_heads, head_size]``.
        kv: ``[2, pool_blocks, block_size, num_kv_heads, head_size]``; NaN where nobody has a live token.
        table: ``[5, max_blocks]`` int32, garbage past a request's blocks.
        num_blocks: ``[5]`` int32.
        alive: ``[5, max_blocks, block_size]`` bool.
    """

    shape: Shape
    q: NDArray[np.float32]
    kv: NDArray[np.float32]
    table: NDArray[np.int32]
    num_blocks: NDArray[np.int32]
    alive: NDArray[np.bool_]

    @property
    def scale(self) -> float:
        return float(self.shape.head_size**-0.5)

    @property
    def live_words(self) -> NDArray[np.int32]:
        """``[5, max_blocks, words_per_block]`` int32, ones in the bits past a block's slots."""
        spare = -self.shape.block_size % 32
        bits = np.pad(self.alive, ((0, 0), (0, 0), (0, spare)), constant_values=True)
        return np.packbits(bits, axis=2, bitorder="little").view("<i4")

    def expected(self) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]:
        """Output shaped like ``q``, lse ``[5, num_query_heads]``, mass ``[5, max_blocks * block_size]``."""
        group = self.shape.num_query_heads // self.shape.num_kv_heads
        out = np.zeros(self.q.shape)
        lse = np.full(self.q.shape[:2], -np.inf)
        mass = np.zeros(self.alive.shape)
        for req, head in np.ndindex(lse.shape):
            index, slot = np.nonzero(self.alive[req])
            if not len(index):
                continue
            keys, values = self.kv[:, self.table[req, index], slot, head // group].astype(np.float64)
            logits = keys @ self.q[req, head].astype(np.float64) * self.scale
            weights = np.exp(logits - logits.max())
            lse[req, head] = logits.max() + np.log(weights.sum())
            weights /= weights.sum()
            out[req, head] = weights @ values
            mass[req, index, slot] += weights
        return out, lse, mass.reshape(len(mass), -1)


def make_batch(shape: Shape, dtype: str, seed: int = 0) -> Batch:
    """Random numbers, blocks in no order, six of ten tokens alive."""
    rng = np.random.default_rng(seed)
    num_query_heads, num_kv_heads, head_size, block_size, max_blocks = shape
    pool_blocks = _NUM_REQS * max_blocks + 1
    table = rng.permutation(np.arange(1, pool_blocks)).reshape(_NUM_REQS, max_blocks).astype(np.int32)
    num_blocks = np.array([max_blocks, 0, 1, rng.integers(1, max_blocks + 1), max_blocks], np.int32)
    table[3, 0] = table[0, -1]
    alive = rng.random((_NUM_REQS, max_blocks, block_size)) < 0.6
    alive[0, -1, :2] = False, True
    alive[3, 0, :2] = True, False
    alive[[1, 2, 4]] = False
    alive[4, -1, -1] = True
    past = np.arange(max_blocks) >= num_blocks[:, None]
    alive[past] = False
    held = np.zeros((pool_blocks, block_size), np.bool_)
    for blocks, slots in zip(table, alive, strict=True):
        held[blocks] |= slots
    kv = _exact(rng.standard_normal((2, pool_blocks, block_size, num_kv_heads, head_size)), dtype)
    kv[:, ~held] = np.nan
    table[past] = GARBAGE_BLOCK
    q = _exact(3 * rng.standard_normal((_NUM_REQS, num_query_heads, head_size)), dtype)
    q[1] = np.nan
    return Batch(shape, q, kv, table, num_blocks, alive)


def _exact(values: NDArray[Any], dtype: str) -> NDArray[np.float32]:
    """The next numbers that the dtype holds."""
    if dtype == "float16":
        return values.astype(np.float16).astype(np.float32)
    single = values.astype(np.float32)
    if dtype == "bfloat16":  # the upper half of float32
        single = (single.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)
    return single
