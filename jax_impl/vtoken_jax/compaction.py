"""Moves tokens to other slots: the paper's relocation (§3.3) as one pure function over donated buffers."""

from collections.abc import Iterator
from functools import partial

import jax

from vtoken.executor import KVSpec
from vtoken.types import cdiv
from vtoken_jax.buckets import chunks, token_sizes
from vtoken_jax.kv_cache import KVCache

__all__ = ["move_in_passes", "move_pieces", "move_tokens"]

_FEW = 16
_MANY = 4096
_PASS_TOKENS = 512
_PASS_BYTES = 1 << 19
"""Of one array's rows: they go through a core's own cache."""


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
        return _moved(plane, src_slots, dst_slots)

    return KVCache(tuple(map(moved, cache.k)), tuple(map(moved, cache.v)), moved(cache.positions))


@partial(jax.jit, donate_argnums=0)
def move_in_passes(cache: KVCache, src_slots: jax.Array, dst_slots: jax.Array, num_passes: int) -> KVCache:
    """``move_tokens`` for any number of disjoint moves in one call and one compilation: array by array, in passes.

    Temporary memory is that of a pass. Where a loop has to ask the host at every turn, as on a GPU, one large pass is
    better.

    Args:
        cache: donated.
        src_slots: ``[max_passes, n]`` int32; padding is 0.
        dst_slots: ``[max_passes, n]`` int32, distinct; padding lies out of range. No pass reads what an earlier one
            wrote (INV-5).
        num_passes: how many of them hold moves.
    """

    def moved(plane: jax.Array) -> jax.Array:
        def move(index: jax.Array, plane: jax.Array) -> jax.Array:
            return _moved(plane, src_slots[index], dst_slots[index])

        done: jax.Array = jax.lax.fori_loop(0, num_passes, move, plane)
        return done

    return KVCache(tuple(map(moved, cache.k)), tuple(map(moved, cache.v)), moved(cache.positions))


def _moved(plane: jax.Array, src_slots: jax.Array, dst_slots: jax.Array) -> jax.Array:
    return plane.at[dst_slots].set(plane[src_slots], mode="drop")


def move_pieces(count: int, spec: KVSpec, platform: str) -> Iterator[tuple[slice, int, int]]:
    """Cuts ``count`` moves into calls: each one's slice, and the passes and tokens of a pass that it is padded to.

    Few shapes are compiled: on a CPU two, one pass for few moves and many for any number, since a call costs as much
    there as dozens of moves; elsewhere as ``buckets.chunks`` has them, one pass each.
    """
    if platform != "cpu":
        for piece, size in chunks(count, token_sizes(spec.token_bytes)):
            yield piece, 1, size
        return
    row_bytes = spec.num_kv_heads * spec.head_size * spec.item_bytes
    size = max(_FEW, min(_PASS_TOKENS, _PASS_BYTES // row_bytes))
    for start in range(0, count, _MANY):
        stop = min(start + _MANY, count)
        yield slice(start, stop), *((1, _FEW) if stop - start <= _FEW else (cdiv(_MANY, size), size))
