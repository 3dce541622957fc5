"""Moves in host memory, done when the call returns."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from vtoken.executor import Buffer
from vtoken.types import SlotId
from vtoken_torch.kv_cache import KVCache

__all__ = ["HostCopyEngine"]


class HostCopyEngine:
    """On the CPU: numpy rows of opaque bytes, one memcpy a row, in the caller's thread.

    Rows as opaque bytes serve every number of moves: take and put on 8-byte integers comes at best even with them
    (from 1000 moves of 2 KB rows on), and costs six times as much at one move. Below 4 moves index_copy on all planes
    is as fast; above, it takes 1.3 to 5 times as long. A thread for the copies hides nothing without a spare core.
    """

    def __init__(self, cache: KVCache) -> None:
        rows = cache.bits.numpy()
        row_type = np.dtype((np.void, rows.shape[-1] * rows.itemsize))
        self._planes: list[NDArray[np.void]] = list(rows.view(row_type)[..., 0])  # each [num_slots]

    def write(self, slots: Sequence[SlotId], kv: Buffer) -> None:
        """Scatters the caller's bytes row by row, with no copy of them in between."""
        index = np.asarray(slots, dtype=np.int64)
        tokens = np.frombuffer(kv, dtype=self._planes[0].dtype).reshape(len(slots), -1)
        for plane, rows in zip(self._planes, tokens.T, strict=True):
            plane[index] = rows

    def move(self, src: Sequence[SlotId], dst: Sequence[SlotId]) -> None:
        """Copies plane by plane."""
        sources, targets = np.asarray(src, dtype=np.int64), np.asarray(dst, dtype=np.int64)
        for plane in self._planes:
            plane[targets] = plane[sources]

    def wait(self) -> None:
        """Nothing is ever under way."""

    def read(self, slots: Tensor) -> memoryview:
        """Gathers plane by plane into token-major rows."""
        index = slots.numpy()
        tokens = np.empty((len(index), len(self._planes)), dtype=self._planes[0].dtype)
        for plane, rows in zip(self._planes, tokens.T, strict=True):
            rows[:] = plane[index]
        return tokens.view(np.uint8).reshape(-1).data
