"""Few shapes for many lengths, so that little is compiled: a length is padded to a size, or cut into pieces of a few.

A piece is padded to its size. The sizes lie a factor of 16 apart and a piece is padded at most fourfold, except in the
smallest size, which costs no more than a call does.
"""

from collections.abc import Iterator
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from vtoken.types import cdiv

__all__ = ["INDEX_SIZES", "bucket", "chunks", "pad", "token_sizes", "width_bucket"]

_Scalar = TypeVar("_Scalar", bound=np.generic)

INDEX_SIZES = (1024, 64)
"""Piece sizes for functions that touch a few bytes for each index."""

_RATIO = 16
_MAX_PADDING = 4
_SMALL_BYTES = 1 << 14
_LARGE_BYTES = 1 << 24
_MIN_WIDTH = 256


def bucket(count: int, least: int = 1) -> int:
    """The size that ``count`` is padded to: ``least`` times a power of two."""
    size = least
    while size < count:
        size *= 2
    return size


def width_bucket(num_slots: int, an_octave: int) -> int:
    """The slots that attention reads: above 256, ``an_octave`` sizes lie evenly between one power of two and the next.

    At most one part in ``an_octave`` is added.
    """
    if num_slots <= _MIN_WIDTH:
        return _MIN_WIDTH
    step = bucket(num_slots, _MIN_WIDTH) // 2 // an_octave
    return cdiv(num_slots, step) * step


def token_sizes(token_bytes: int) -> tuple[int, ...]:
    """Piece sizes, descending, for functions that touch the whole KV of each token.

    The smallest is at most 16 KiB (or one token), the largest at most 16 MiB, which bounds temporaries.
    """
    sizes = [max(1, min(64, _SMALL_BYTES // token_bytes))]
    while sizes[0] < 1024 and sizes[0] * _RATIO * token_bytes <= _LARGE_BYTES:
        sizes.insert(0, sizes[0] * _RATIO)
    return tuple(sizes)


def chunks(count: int, sizes: tuple[int, ...]) -> Iterator[tuple[slice, int]]:
    """Cuts ``range(count)`` into pieces; yields each piece's slice and the size to pad it to."""
    start = 0
    for size in sizes:
        threshold = 0 if size == sizes[-1] else size // _MAX_PADDING
        while count - start > threshold:
            stop = min(start + size, count)
            yield slice(start, stop), size
            start = stop


def pad(rows: npt.NDArray[_Scalar], size: int, fill: float) -> npt.NDArray[_Scalar]:
    """``rows`` with ``fill`` behind them, up to ``size`` along the first axis."""
    if len(rows) == size:
        return rows
    padded = np.full((size, *rows.shape[1:]), fill, rows.dtype)
    padded[: len(rows)] = rows
    return padded
