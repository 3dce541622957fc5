"""What a KV store asks of a copy engine, and which one it gets."""

from collections.abc import Sequence
from functools import partial
from typing import Protocol

from torch import Tensor

from vtoken.executor import Buffer
from vtoken.types import SlotId
from vtoken_torch.copy_engine.cuda import CUDACopyEngine
from vtoken_torch.copy_engine.device import CUDADevice
from vtoken_torch.copy_engine.host import HostCopyEngine
from vtoken_torch.copy_engine.indexed import IndexCopyEngine, StreamedCopyEngine
from vtoken_torch.kv_cache import KVCache

__all__ = ["CopyEngine", "make_copy_engine"]


class CopyEngine(Protocol):
    """Writes, moves and reads tokens of one cache. Slots of a call are distinct; positions are not its business."""

    def write(self, slots: Sequence[SlotId], kv: Buffer) -> None:
        """Stores canonical bytes, ``len(slots) * token_bytes``, after all moves so far."""
        ...

    def move(self, src: Sequence[SlotId], dst: Sequence[SlotId]) -> None:
        """Copies tokens in all layers. Sources and destinations are disjoint (INV-5), so that any order will do."""
        ...

    def wait(self) -> None:
        """Work that is enqueued from here on comes after all moves so far; whoever reads the cache calls it first."""
        ...

    def read(self, slots: Tensor) -> memoryview:
        """Canonical bytes of tokens, ``[len(slots) * token_bytes]``; ``slots`` is int64 on the cache's device."""
        ...


def make_copy_engine(cache: KVCache) -> CopyEngine:
    """The engine for the device that a cache lives on. On CUDA, regime ``fenced`` gives moves a stream of their own."""
    if cache.device.type == "cpu":
        return HostCopyEngine(cache)
    indexed = IndexCopyEngine(cache)
    if cache.device.type != "cuda":
        return indexed
    from vtoken_torch.kernels.move import move_tokens  # needs Triton, which PyTorch for the CPU comes without
    from vtoken_torch.kernels.planes import KVPlanes

    mover = partial(move_tokens, KVPlanes.of_cache(cache))
    own_stream = cache.spec.regime == "fenced"
    return StreamedCopyEngine(indexed, CUDACopyEngine(CUDADevice(cache.device), mover, own_stream=own_stream))
