"""Moves in host memory, done when the call returns."""

import ctypes
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from vtoken.executor import Buffer
from vtoken.native.loader import load
from vtoken.types import SlotId
from vtoken_torch.kv_cache import KVCache

__all__ = ["HostCopyEngine"]


class HostCopyEngine:
    """On the CPU: rows of opaque bytes, in the caller's thread. A thread for copies hides nothing without a spare core.

    Moves are compiled code (``move_planes.cc``), two to three times as fast as NumPy's, which are the way where no
    compiler is. Of what NumPy and PyTorch offer, rows as opaque bytes serve every number of moves best: take and put on
    8-byte integers comes at best even with them (from 1000 moves of 2 KB rows on), and costs six times as much at one.
    """

    def __init__(self, cache: KVCache) -> None:
        rows = cache.bits.numpy()
        row_type = np.dtype((np.void, rows.shape[-1] * rows.itemsize))
        self._rows: NDArray[np.void] = rows.view(row_type)[..., 0]  # [num_planes, num_slots]
        self._native = _native()

    def write(self, slots: Sequence[SlotId], kv: Buffer) -> None:
        """Scatters the caller's bytes row by row, with no copy of them in between."""
        index = np.asarray(slots, dtype=np.int64)
        tokens = np.frombuffer(kv, dtype=self._rows.dtype).reshape(len(slots), -1)
        for plane, rows in zip(self._rows, tokens.T, strict=True):
            plane[index] = rows

    def move(self, src: Sequence[SlotId], dst: Sequence[SlotId]) -> None:
        """Copies plane by plane. Raises IndexError, with nothing moved, if a slot lies outside the pool."""
        slots = np.array([src, dst], dtype=np.int32)
        outside = self._move_by_numpy(slots) if self._native is None else self._move_natively(self._native, slots)
        if outside >= 0:
            num_slots = self._rows.shape[1]
            raise IndexError(f"move {outside} from slot {src[outside]} to {dst[outside]} leaves the {num_slots} slots")

    def _move_natively(self, function: Callable[..., int], slots: NDArray[np.int32]) -> int:
        size = *self._rows.shape, self._rows.itemsize
        return function(self._rows.ctypes.data, *size, *(row.ctypes.data for row in slots), slots.shape[1])

    def _move_by_numpy(self, slots: NDArray[np.int32]) -> int:
        outside = np.flatnonzero(((slots < 0) | (slots >= self._rows.shape[1])).any(axis=0))
        if len(outside):
            return int(outside[0])
        sources, targets = slots.astype(np.int64)
        for plane in self._rows:
            plane[targets] = plane[sources]
        return -1

    def wait(self) -> None:
        """Nothing is ever under way."""

    def read(self, slots: Tensor) -> memoryview:
        """Gathers plane by plane into token-major rows."""
        index = slots.numpy()
        tokens = np.empty((len(index), len(self._rows)), dtype=self._rows.dtype)
        for plane, rows in zip(self._rows, tokens.T, strict=True):
            rows[:] = plane[index]
        return tokens.view(np.uint8).reshape(-1).data


@cache
def _native() -> Callable[..., int] | None:
    library = load(Path(__file__).with_name("move_planes.cc"))
    if library is None:
        return None
    pointer, number = ctypes.c_void_p, ctypes.c_int64
    function = library.vtoken_move_planes
    function.argtypes = [pointer, number, number, number, pointer, pointer, number]
    function.restype = number
    return function
