"""Writes tokens from the host's memory into the pool: in one pass by compiled code on a CPU, by XLA elsewhere."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import numpy as np
import numpy.typing as npt

from vtoken.executor import Buffer, KVSpec
from vtoken_jax.buckets import chunks, pad, token_sizes
from vtoken_jax.kv_cache import KVCache, write_tokens
from vtoken_jax.native.operations import WRITE_ROWS, in_place, is_there

__all__ = ["Writer", "make_writer", "write_rows"]

_Ints = npt.NDArray[np.int32]

Writer = Callable[[KVCache, _Ints, _Ints, Buffer], KVCache]
"""Cache (donated), ``[n]`` slots, distinct, ``[n]`` positions, KV bytes ``[n, token_bytes]``: the cache that has them.

What was given may change once the call has returned.
"""


@partial(jax.jit, donate_argnums=0)
def write_rows(cache: KVCache, told: jax.Array) -> KVCache:
    """``write_tokens`` on a CPU by the compiled ``write_rows.cc``, from memory that JAX knows nothing of.

    Only where ``is_there(WRITE_ROWS)``. The memory has to stay as it is until the returned arrays are ready.

    Args:
        cache: donated.
        told: ``[8]`` uint32, four words of 64 bits: how many tokens there are, and where their slots (``[n]`` int32),
            positions (``[n]`` int32) and KV bytes (``[n, token_bytes]``) lie.

    Raises:
        ValueError or jax.errors.JaxRuntimeError: a slot lies outside; nothing was written, the donated cache is gone.
    """
    return in_place(WRITE_ROWS, cache, told)


def make_writer(spec: KVSpec, platform: str) -> Writer:
    """The fastest writer for pools of ``spec`` there; at most three shapes are compiled, whatever is written."""
    if platform == "cpu" and is_there(WRITE_ROWS):
        return _NativeWriter()
    return partial(_write_by_xla, token_sizes(spec.token_bytes))


class _NativeWriter:
    """Waits until all is written. Keeps what XLA reads until then, also where a KeyboardInterrupt ends the wait."""

    def __init__(self) -> None:
        self._lists: tuple[npt.NDArray[Any], ...] = ()

    def __call__(self, cache: KVCache, slots: _Ints, positions: _Ints, kv: Buffer) -> KVCache:
        self._lists = slots, positions, np.frombuffer(kv, np.uint8)
        told = np.array([len(slots), *(each.ctypes.data for each in self._lists)], np.uint64).view(np.uint32)
        written: KVCache = write_rows(cache, told)
        written.positions.block_until_ready()  # as all of them are then
        self._lists = ()
        return written


def _write_by_xla(sizes: tuple[int, ...], cache: KVCache, slots: _Ints, positions: _Ints, kv: Buffer) -> KVCache:
    # JAX may read the caller's memory after this call has returned: what can change is copied first.
    data, plane = kv if isinstance(kv, bytes) else bytes(kv), cache.k[0]
    tokens = np.frombuffer(data, plane.dtype).reshape(len(slots), 2 * len(cache.k), plane.shape[1])
    for piece, size in chunks(len(slots), sizes):
        cache = write_tokens(
            cache,
            pad(slots[piece], size, len(cache.positions)),
            pad(positions[piece], size, 0),
            pad(tokens[piece], size, 0),
        )
    return cache
