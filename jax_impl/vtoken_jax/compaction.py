"""Moves tokens to other slots: the paper's relocation (§3.3) as one pure function over donated buffers."""

from functools import partial

import jax

from vtoken_jax.kv_cache import KVCache

__all__ = ["move_tokens"]


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
