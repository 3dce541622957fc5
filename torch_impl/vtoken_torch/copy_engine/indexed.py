"""Copies with PyTorch's index operations, on any device."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from vtoken.executor import Buffer
from vtoken.types import SlotId
from vtoken_torch.copy_engine.cuda import CUDACopyEngine
from vtoken_torch.kv_cache import KVCache
from vtoken_torch.upload import send, upload

__all__ = ["IndexCopyEngine", "StreamedCopyEngine"]


class IndexCopyEngine:
    """index_copy on the current stream, all layers in one call; the stream orders it."""

    def __init__(self, cache: KVCache) -> None:
        self._wide = cache.wide
        self._device = cache.device

    def write(self, slots: Sequence[SlotId], kv: Buffer) -> None:
        """Uploads the bytes and scatters them."""
        tokens = torch.frombuffer(bytearray(kv), dtype=self._wide.dtype)  # a copy: torch wants memory it may write
        rows = send(tokens, self._device).view(len(slots), self._wide.shape[0], -1).transpose(0, 1)
        self._wide.index_copy_(1, upload(slots, self._device), rows)

    def move(self, src: Sequence[SlotId], dst: Sequence[SlotId]) -> None:
        """Gathers the sources, then scatters them."""
        self._move(*upload([src, dst], self._device))

    def move_planned(self, src: Tensor, dst: Tensor, count: Tensor) -> None:
        """``move`` as a ``Mover``; the lists have no rest behind their count, which so needs no look."""
        self._move(src.to(torch.int64), dst.to(torch.int64))

    def wait(self) -> None:
        """The stream orders it."""

    def read(self, slots: Tensor) -> memoryview:
        """Gathers token-major rows and downloads them."""
        tokens = self._wide.index_select(1, slots).transpose(0, 1).contiguous().cpu()
        return tokens.numpy().view(np.uint8).reshape(-1).data

    def _move(self, src: Tensor, dst: Tensor) -> None:
        self._wide.index_copy_(1, dst, self._wide.index_select(1, src))


class StreamedCopyEngine:
    """Writes and reads on the current stream, moves where ``moves`` has them."""

    def __init__(self, indexed: IndexCopyEngine, moves: CUDACopyEngine) -> None:
        self._indexed, self.moves = indexed, moves

    def write(self, slots: Sequence[SlotId], kv: Buffer) -> None:
        """Waits for the moves, for it may write what they read."""
        self.wait()
        self._indexed.write(slots, kv)

    def move(self, src: Sequence[SlotId], dst: Sequence[SlotId]) -> None:
        """Begins once all that is enqueued has happened."""
        self.moves.launch(src, dst)

    def wait(self) -> None:
        """Holds back the current stream, never the host."""
        self.moves.wait()

    def read(self, slots: Tensor) -> memoryview:
        """Waits for the moves."""
        self.wait()
        return self._indexed.read(slots)
