"""The PyTorch executor with its moves on a fake device: what runs it on a CPU runs ``CUDACopyEngine``'s call sequence.

``vtoken conformance --executor vtoken_torch.copy_engine.fake_executor:FakeStreamExecutor``
"""

from typing import ClassVar

from vtoken.executor import KVSpec
from vtoken_torch.copy_engine.cuda import CUDACopyEngine
from vtoken_torch.copy_engine.fake_device import FakeDevice
from vtoken_torch.copy_engine.indexed import IndexCopyEngine, StreamedCopyEngine
from vtoken_torch.executor import TorchExecutor
from vtoken_torch.kv_cache import KVCache
from vtoken_torch.kv_store import TorchKVStore

__all__ = ["FakeStreamExecutor", "fake_stream_copies"]


def fake_stream_copies(cache: KVCache) -> StreamedCopyEngine:
    """For ``TorchKVStore``: all but the moves happens at once, on a compute stream that runs ahead; moves happen when
    they are waited for.
    """
    indexed = IndexCopyEngine(cache)
    return StreamedCopyEngine(indexed, CUDACopyEngine(FakeDevice(lag=1, eager={"compute"}), indexed.move_planned))


class FakeStreamExecutor(TorchExecutor):
    """The PyTorch executor over ``fake_stream_copies``.

    Attributes:
        moves: the engine of the pool that was allocated last.
    """

    name: ClassVar[str] = "torch on a fake device"
    moves: CUDACopyEngine

    def _make_store(self, spec: KVSpec) -> TorchKVStore:
        return TorchKVStore(spec, self.device, self._make_copies)

    def _make_copies(self, cache: KVCache) -> StreamedCopyEngine:
        copies = fake_stream_copies(cache)
        self.moves = copies.moves
        return copies
