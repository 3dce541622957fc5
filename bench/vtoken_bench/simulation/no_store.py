"""An executor that keeps no KV: the spec's own table and pool, with nothing beneath them."""

from collections.abc import Sequence
from typing import NoReturn

from vtoken.errors import SpecError
from vtoken.executor import Attention, Buffer, KVSpec, RequestObservation
from vtoken.paged_executor import PagedExecutor
from vtoken.types import BlockId, Move, Position, SlotId

__all__ = ["CapacityExecutor", "NoStore"]


class NoStore:
    """A ``KVStore`` without arrays: writes and moves cost nothing, and there is nothing to read back."""

    def write(self, slots: Sequence[SlotId], positions: Sequence[Position], kv: Buffer) -> None:
        pass

    def move(self, moves: Sequence[Move]) -> None:
        pass

    def set_row(self, row: int, block_ids: Sequence[BlockId], live_words: Sequence[int]) -> None:
        pass

    def set_words(self, row: int, indices: Sequence[int], live_words: Sequence[int]) -> None:
        pass

    def set_free(self, block_ids: Sequence[BlockId], free: bool) -> None:
        pass

    def attend(self, row: int, q: Buffer, query_positions: Sequence[Position]) -> Attention:
        _refuse()

    def read_row(self, row: int) -> RequestObservation:
        _refuse()

    def fingerprint_row(self, row: int) -> str:
        _refuse()

    def read_free(self) -> frozenset[BlockId]:
        _refuse()


def _refuse() -> NoReturn:
    raise SpecError("a capacity simulation keeps no KV, so nothing can be read back: use the executor 'reference'")


class CapacityExecutor(PagedExecutor):
    """Where the blocks are, and nothing else. Capacity depends on block ids and liveness alone, never on bytes."""

    name = "capacity"

    def _make_store(self, spec: KVSpec) -> NoStore:
        return NoStore()
