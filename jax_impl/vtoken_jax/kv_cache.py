"""The KV pool's layout, said once, and the two functions that write and read whole tokens.

Elements are stored as unsigned integers of the KV dtype's width. A copy is then a copy of bits in every dtype (NaN
payloads survive), and XLA's CPU backend does not widen a bfloat16 scatter to float32 over the whole pool.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from vtoken.executor import KVSpec

__all__ = ["UNWRITTEN_POSITION", "KVCache", "make_cache", "read_tokens", "storage_dtype", "write_tokens"]

UNWRITTEN_POSITION = np.iinfo(np.int32).max
"""Position of a slot that was never written: after every query, so that no query sees it."""


class KVCache(NamedTuple):
    """One pool, a pytree; functions that change it take it as a donated argument and return it.

    Attributes:
        k, v: for each layer ``[num_slots, num_kv_heads * head_size]``, unsigned integers.
        positions: ``[num_slots]`` int32, the position of the token whose KV lies in each slot.
    """

    k: tuple[jax.Array, ...]
    v: tuple[jax.Array, ...]
    positions: jax.Array

    @property
    def planes(self) -> list[jax.Array]:
        """All KV arrays in canonical order: layer by layer, K then V."""
        return [plane for layer in zip(self.k, self.v, strict=True) for plane in layer]


def storage_dtype(item_bytes: int) -> np.dtype[np.unsignedinteger]:
    """The unsigned integer that holds the bits of one element, little end first."""
    return np.dtype(f"<u{item_bytes}")


@partial(jax.jit, static_argnums=0)
def make_cache(spec: KVSpec) -> KVCache:
    """A pool in which nothing is written: every bit of K and V is set, which is NaN in every float format."""
    shape, dtype = (spec.num_slots, spec.num_kv_heads * spec.head_size), storage_dtype(spec.item_bytes)

    def planes() -> tuple[jax.Array, ...]:
        return tuple(jnp.full(shape, np.iinfo(dtype).max, dtype) for _ in range(spec.num_layers))

    return KVCache(planes(), planes(), jnp.full(spec.num_slots, UNWRITTEN_POSITION, jnp.int32))


@partial(jax.jit, donate_argnums=0)
def write_tokens(cache: KVCache, slots: jax.Array, positions: jax.Array, kv: jax.Array) -> KVCache:
    """Stores tokens.

    Args:
        cache: donated.
        slots: ``[n]`` int32, distinct; padding lies out of range.
        positions: ``[n]`` int32.
        kv: ``[n, 2 * num_layers, num_kv_heads * head_size]``, storage dtype, canonical order.
    """
    planes = [plane.at[slots].set(kv[:, i], mode="drop") for i, plane in enumerate(cache.planes)]
    return KVCache(tuple(planes[::2]), tuple(planes[1::2]), cache.positions.at[slots].set(positions, mode="drop"))


@jax.jit
def read_tokens(cache: KVCache, slots: jax.Array) -> jax.Array:
    """KV bits ``[n, 2 * num_layers, num_kv_heads * head_size]`` of slots ``[n]``, in a new array."""
    return jnp.stack([plane[slots] for plane in cache.planes], axis=1)
