"""Operations on a pool that C++ does on a CPU, a file each: compiled on first use, and known to XLA by name."""

from functools import cache
from pathlib import Path
from typing import Any

import jax

from vtoken.native.loader import load
from vtoken_jax.kv_cache import KVCache

__all__ = ["MOVE_ROWS", "WRITE_ROWS", "in_place", "is_there"]

MOVE_ROWS, WRITE_ROWS = "move_rows", "write_rows"

_HERE = Path(__file__).parent


@cache
def is_there(operation: str) -> bool:
    """Whether an operation can be called: it needs a C++ compiler, once on a machine (``vtoken.native``)."""
    foreign: Any = jax.ffi
    library = load(_HERE / f"{operation}.cc", _HERE, Path(foreign.include_dir()))
    if library is None:
        return False
    name = _target(operation)
    foreign.register_ffi_target(name, foreign.pycapsule(getattr(library, name)), platform="cpu")
    return True


def in_place(operation: str, cache: KVCache, *told: jax.Array) -> KVCache:
    """Calls an operation that ``is_there`` on ``told`` and on all arrays of a pool, which it changes where they lie.

    They come in canonical order, positions last. Where a jitted caller has not donated them, XLA copies them first.
    """
    arrays = [*cache.planes, cache.positions]
    aliases = {len(told) + index: index for index in range(len(arrays))}
    *planes, positions = jax.ffi.ffi_call(_target(operation), arrays, input_output_aliases=aliases)(*told, *arrays)
    return KVCache(tuple(planes[::2]), tuple(planes[1::2]), positions)


def _target(operation: str) -> str:
    return f"vtoken_{operation}"
