"""A small paged pool with every trap in it."""

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from vtoken_jax.kernels.decode import reference_decode

TOLERANCE = {"float32": 1e-5, "bfloat16": 2**-7, "float16": 2**-10}
"""|difference| over max|reference|, by the narrower of the query's and the pool's dtype (DESIGN §6)."""


@dataclass
class World:
    """Requests over scattered blocks; whatever no request owns, and every dead slot, is NaN."""

    q: npt.NDArray[Any]  # [batch, num_query_heads, head_size]
    planes: list[npt.NDArray[Any]]  # K and V, [num_slots, num_kv_heads * head_size]
    table: npt.NDArray[np.int32]
    num_blocks: npt.NDArray[np.int32]
    live: npt.NDArray[np.bool_]  # [batch, max_blocks * block_size]
    slots: npt.NDArray[np.int64]
    kv_dtype: str
    num_kv_heads: int
    block_size: int

    @property
    def static(self) -> dict[str, Any]:
        return {
            "scale": self.q.shape[-1] ** -0.5,
            "kv_dtype": self.kv_dtype,
            "num_kv_heads": self.num_kv_heads,
            "block_size": self.block_size,
        }

    @property
    def bits(self) -> list[npt.NDArray[Any]]:
        return [plane.view(f"<u{plane.itemsize}") for plane in self.planes]

    @property
    def live_words(self) -> npt.NDArray[np.uint32]:
        num_words = -(-self.block_size // 32)
        by_block = self.live.reshape(*self.table.shape, self.block_size)
        padded = np.zeros((*self.table.shape, num_words * 32), np.bool_)
        padded[..., : self.block_size] = by_block
        return np.packbits(padded, axis=-1, bitorder="little").view("<u4").reshape(len(self.table), -1)

    @property
    def arguments(self) -> tuple[Any, ...]:
        return self.q, *self.bits, self.table, self.num_blocks, self.live_words

    def expected(self) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
        """Output and mass."""
        return reference_decode(*self.arguments, **self.static)


def make_world(
    *,
    heads: tuple[int, int] = (4, 2),
    head_size: int = 16,
    block_size: int = 16,
    held: tuple[int, ...] = (3, 1),
    kv_dtype: str = "float32",
    q_dtype: str | None = None,
    live_share: float = 0.7,
    max_blocks: int | None = None,
    pool_blocks: int | None = None,
    magnitude: float = 1.0,
    seed: int = 0,
) -> World:
    """``held``: blocks of each request; the table is one block wider than the longest, unless told otherwise."""
    rng = np.random.default_rng(seed)
    num_blocks, max_blocks = pool_blocks or 2 + sum(held), max_blocks or max(held) + 1
    shape = num_blocks * block_size, heads[1] * head_size
    planes = [(magnitude * rng.standard_normal(shape)).astype(jnp.dtype(kv_dtype)) for _ in range(2)]
    table = np.zeros((len(held), max_blocks), np.int32)
    live = np.zeros((len(held), max_blocks, block_size), np.bool_)
    ids = iter(rng.permutation(np.arange(1, num_blocks)))
    for request, count in enumerate(held):
        table[request, :count] = [next(ids) for _ in range(count)]
        live[request, :count] = rng.random((count, block_size)) < live_share
    slots = (table[..., None].astype(np.int64) * block_size + np.arange(block_size)).reshape(len(held), -1)
    flat = live.reshape(len(held), -1)
    dead = np.ones(len(planes[0]), np.bool_)
    dead[slots[flat]] = False
    for plane in planes:
        plane[dead] = np.nan
    q = (magnitude * rng.standard_normal((len(held), heads[0], head_size))).astype(jnp.dtype(q_dtype or kv_dtype))
    held_counts = np.array(held, np.int32)
    return World(q, planes, table, held_counts, flat, slots, kv_dtype, heads[1], block_size)


def assert_close(got: Any, expected: npt.NDArray[np.float64], dtype: str) -> None:
    bound = TOLERANCE[dtype] * max(1.0, float(np.abs(expected).max(initial=0.0)))
    np.testing.assert_allclose(np.asarray(got, np.float64), expected, rtol=0, atol=bound)
