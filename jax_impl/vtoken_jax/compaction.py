"""Moves tokens to other slots: the paper's relocation (§3.3) as one pure function over donated buffers."""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from vtoken.executor import KVSpec
from vtoken_jax.buckets import chunks, pad, token_sizes
from vtoken_jax.kv_cache import KVCache
from vtoken_jax.native.operations import MOVE_ROWS, in_place, is_there

__all__ = ["make_mover", "move_rows", "move_tokens"]

_FEW, _MANY = 16, 4096

Mover = Callable[[KVCache, npt.NDArray[np.int32], npt.NDArray[np.int32]], KVCache]
"""Cache (donated), ``[n]`` sources, ``[n]`` destinations, disjoint (INV-5), ``n`` any: the cache after the moves."""


@partial(jax.jit, donate_argnums=0)
def move_tokens(cache: KVCache, src_slots: jax.Array, dst_slots: jax.Array) -> KVCache:
    """Copies KV bits and positions from source to destination slots in all layers, all moves at once.

    All sources are gathered before anything is scattered, so that overlapping moves would be right too; time and
    temporary memory grow with the moves, not with the pool.

    Args:
        cache: donated.
        src_slots: ``[n]`` int32; padding is 0.
        dst_slots: ``[n]`` int32, distinct; padding lies out of range and is dropped.
    """

    def moved(plane: jax.Array) -> jax.Array:
        return plane.at[dst_slots].set(plane[src_slots], mode="drop")

    return KVCache(tuple(map(moved, cache.k)), tuple(map(moved, cache.v)), moved(cache.positions))


@partial(jax.jit, donate_argnums=0)
def move_rows(cache: KVCache, src_slots: jax.Array, dst_slots: jax.Array, count: jax.Array) -> KVCache:
    """``move_tokens`` on a CPU by the compiled ``move_rows.cc``: no temporary memory, and about twice as fast.

    Only where ``is_there(MOVE_ROWS)``.

    Args:
        cache: donated.
        src_slots, dst_slots: ``[n]`` integers; of the first ``count`` no source is a destination.
        count: ``[]`` integer; what lies behind is padding.

    Raises:
        ValueError or jax.errors.JaxRuntimeError: a slot lies outside; nothing was moved, and the donated cache is gone.
            Which of the two, and whether here or where the result is waited for, is JAX's choice.
    """
    told = (number.astype(jnp.int32) for number in map(jnp.asarray, (src_slots, dst_slots, count)))
    return in_place(MOVE_ROWS, cache, *told)


def make_mover(spec: KVSpec, platform: str) -> Mover:
    """The fastest mover for pools of ``spec`` there; at most three shapes are compiled, whatever the moves."""
    if platform == "cpu" and is_there(MOVE_ROWS):
        return _move_natively
    return partial(_move_by_xla, token_sizes(spec.token_bytes))


def _move_natively(cache: KVCache, src: npt.NDArray[np.int32], dst: npt.NDArray[np.int32]) -> KVCache:
    for start in range(0, len(src), _MANY):
        piece = slice(start, start + _MANY)
        count = len(src[piece])
        size = _FEW if count <= _FEW else _MANY
        cache = move_rows(cache, pad(src[piece], size, 0), pad(dst[piece], size, 0), np.int32(count))
    return cache


def _move_by_xla(
    sizes: tuple[int, ...], cache: KVCache, src: npt.NDArray[np.int32], dst: npt.NDArray[np.int32]
) -> KVCache:
    outside = len(cache.positions)
    for piece, size in chunks(len(src), sizes):
        cache = move_tokens(cache, pad(src[piece], size, 0), pad(dst[piece], size, outside))
    return cache
