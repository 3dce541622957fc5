"""The arrays of one pool behind the spec's ``KVStore`` protocol. What is read back is what these arrays hold.

Changes of tables are staged, and go to the device together before the next one reads them (``DeviceTables.flush``).
So are moves: those of all requests in a pass are one launch, before the next write or read (``settle``).
"""

from collections.abc import Callable, Sequence

import torch

from vtoken.executor import Attention, Buffer, KVSpec, RequestObservation
from vtoken.types import BlockId, Move, Position, SlotId
from vtoken_torch.attention import attend_slots
from vtoken_torch.copy_engine import CopyEngine, make_copy_engine
from vtoken_torch.device_tables import DeviceTables
from vtoken_torch.fingerprint import fingerprint_slots
from vtoken_torch.kv_cache import KVCache
from vtoken_torch.upload import send, upload

__all__ = ["TorchKVStore"]


class TorchKVStore:
    """KV cache, tables and free flags of one pool on one device.

    Args:
        spec: shapes, and the regime that the copies keep to.
        device: where everything lies.
        make_copies: gives the engine that writes, moves and reads tokens.
    """

    def __init__(
        self, spec: KVSpec, device: torch.device, make_copies: Callable[[KVCache], CopyEngine] = make_copy_engine
    ) -> None:
        self.spec = spec
        self.cache = KVCache(spec, device)
        self.tables = DeviceTables(spec, device)
        self.copies = make_copies(self.cache)
        self._src: list[SlotId] = []  # of moves that are not launched yet
        self._dst: list[SlotId] = []
        self._sources: set[SlotId] = set()
        self._targets: set[SlotId] = set()

    # -- writing -----------------------------------------------------------------------------------------------------

    def write(self, slots: Sequence[SlotId], positions: Sequence[Position], kv: Buffer) -> None:
        """Stores tokens: KV bytes ``[len(slots), token_bytes]`` and positions. Slots are distinct."""
        self.settle()
        self.copies.write(slots, kv)
        self.cache.positions.index_copy_(0, upload(slots, self.cache.device), self._int32(positions))

    def move(self, moves: Sequence[Move]) -> None:
        """Copies KV bits and positions from source to destination slots, all layers (INV-5 holds: any order).

        They wait for ``settle``, so that moves of many requests are one launch; moves that have to come after the ones
        that wait are the next.
        """
        src, dst = [move.src_slot for move in moves], [move.dst_slot for move in moves]
        targets = self._targets
        if not (targets.isdisjoint(src) and targets.isdisjoint(dst) and self._sources.isdisjoint(dst)):
            self._launch_moves()
        self._src += src
        self._dst += dst
        self._sources.update(src)
        self._targets.update(dst)

    def settle(self) -> None:
        """Work that is enqueued from here on, reads and writes alike, comes after all moves so far."""
        self._launch_moves()
        self.copies.wait()

    def _launch_moves(self) -> None:
        if not self._src:
            return
        self.copies.move(self._src, self._dst)
        src, dst = upload([self._src, self._dst], self.cache.device)
        positions = self.cache.positions
        positions.index_copy_(0, dst, positions.index_select(0, src))
        self._src, self._dst = [], []
        self._sources.clear()
        self._targets.clear()

    def set_row(self, row: int, block_ids: Sequence[BlockId], live_words: Sequence[int]) -> None:
        """Rewrites one request's row: its block ids and live words; what was there before is gone."""
        self.tables.set_row(row, block_ids, live_words)

    def set_words(self, row: int, indices: Sequence[int], live_words: Sequence[int]) -> None:
        """Updates live words at some block indices of a row."""
        self.tables.set_words(row, indices, live_words)

    def set_free(self, block_ids: Sequence[BlockId], free: bool) -> None:
        """Flags blocks as free or not."""
        self.tables.set_free(block_ids, free)

    # -- reading -----------------------------------------------------------------------------------------------------

    def attend(self, row: int, q: Buffer, query_positions: Sequence[Position]) -> Attention:
        """Masked attention over the row's live slots; a query sees the tokens at its position or before."""
        spec = self.spec
        self.settle()
        queries = send(torch.frombuffer(bytearray(q), dtype=torch.float32), self.cache.device)
        queries = queries.view(len(query_positions), spec.num_layers, spec.num_query_heads, spec.head_size)
        return attend_slots(self.cache, self.tables.live_slots(row), queries, self._int32(query_positions))

    def read_row(self, row: int) -> RequestObservation:
        """Reads a request back from the arrays."""
        self.settle()
        block_ids, live_words = self.tables.read_row(row)
        slots = self.tables.live_slots(row)
        data, size = self.copies.read(slots), self.spec.token_bytes
        return RequestObservation(
            block_ids=block_ids,
            live_words=live_words,
            positions=tuple(self.cache.positions[slots].tolist()),
            kv=tuple(bytes(data[first : first + size]) for first in range(0, len(data), size)),
            fingerprint=fingerprint_slots(self.cache, slots),
        )

    def fingerprint_row(self, row: int) -> str:
        """The fingerprint of ``read_row`` alone: no KV leaves the device."""
        self.settle()
        return fingerprint_slots(self.cache, self.tables.live_slots(row))

    def read_free(self) -> frozenset[BlockId]:
        """Blocks flagged free."""
        return self.tables.read_free()

    def _int32(self, values: Sequence[int]) -> torch.Tensor:
        return upload(values, self.cache.device).int()
