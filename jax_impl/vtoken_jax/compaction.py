"""Moves tokens to other slots: the paper's relocation (§3.3) as one pure function over donated buffers."""

from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
import numpy.typing as npt

from vtoken.executor import KVSpec
from vtoken.native.library import load
from vtoken_jax.buckets import chunks, pad, token_sizes
from vtoken_jax.kv_cache import KVCache

__all__ = ["make_mover", "move_rows", "move_tokens", "rows_are_native"]

_FEW, _MANY = 16, 4096
_TARGET = "vtoken_move_rows"

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
    """``move_tokens`` on a CPU by the compiled ``move_rows.cc``: no temporary memory, and two to three times as fast.

    Only where ``rows_are_native()``.

    Args:
        cache: donated.
        src_slots, dst_slots: ``[n]`` int32; of the first ``count`` no source is a destination.
        count: ``[]`` int32; what lies behind is padding.

    Raises:
        jax.errors.JaxRuntimeError: a slot lies outside; nothing was moved, and the donated cache is gone.
    """
    planes, structure = jax.tree.flatten(cache)
    in_place = {3 + index: index for index in range(len(planes))}
    call = jax.ffi.ffi_call(_TARGET, planes, input_output_aliases=in_place)
    moved: KVCache = jax.tree.unflatten(structure, call(src_slots, dst_slots, count, *planes))
    return moved


@cache
def rows_are_native() -> bool:
    """Whether ``move_rows`` can be called: a C++ compiler makes its code, once on a machine (``vtoken.native``)."""
    library = load(Path(__file__).with_name("move_rows.cc"), Path(jax.ffi.include_dir()))
    if library is None:
        return False
    foreign: Any = jax.ffi
    foreign.register_ffi_target(_TARGET, foreign.pycapsule(library.vtoken_move_rows), platform="cpu")
    return True


def make_mover(spec: KVSpec, platform: str) -> Mover:
    """The fastest mover for pools of ``spec`` there; at most three shapes are compiled, whatever the moves."""
    if platform == "cpu" and rows_are_native():
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
