"""The KV store of one pool: turns the host's lists into padded arrays, and the device's arrays into observations."""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import jax
import numpy as np
import numpy.typing as npt

from vtoken.errors import SpecError
from vtoken.executor import Attention, Buffer, KVSpec, RequestObservation
from vtoken.fingerprint import SALTS
from vtoken.types import NULL_BLOCK_ID, BlockId, Move, Position, SlotId
from vtoken_jax import device_tables, fingerprint
from vtoken_jax.attention import attend_row
from vtoken_jax.buckets import INDEX_SIZES, chunks, pad, token_sizes
from vtoken_jax.compaction import make_mover
from vtoken_jax.kv_cache import make_cache, read_tokens
from vtoken_jax.placement import made_on, platform_of
from vtoken_jax.writing import make_writer

__all__ = ["JaxKVStore"]

_Ints = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class _Layout:
    """One row on the host: slots and positions of its live tokens in physical order, as the device's arrays say."""

    block_ids: _Ints
    words: npt.NDArray[np.uint32]  # [num_blocks, words_per_block]
    live: npt.NDArray[np.bool_]  # [num_blocks * block_size]
    slots: _Ints
    positions: _Ints


class JaxKVStore:
    """Arrays of one pool. Every change is one compiled call that donates what it changes.

    Args:
        spec: of the pool.
        device: where it lies; None is JAX's default.
    """

    def __init__(self, spec: KVSpec, device: jax.Device | None = None) -> None:
        self.spec = spec
        self.cache = made_on(device, lambda: make_cache(spec))
        self.tables = made_on(device, lambda: device_tables.make_tables(spec))
        width = spec.num_kv_heads * spec.head_size
        shape = {"num_planes": 2 * spec.num_layers, "width": width, "item_bytes": spec.item_bytes}
        self._weights = made_on(device, lambda: fingerprint.make_weights(**shape))
        self._sizes = token_sizes(spec.token_bytes)
        self._words_per_block = device_tables.words_per_block(spec.block_size)
        platform = platform_of(device)
        self._writer, self._mover = make_writer(spec, platform), make_mover(spec, platform)

    # -- writing -----------------------------------------------------------------------------------------------------

    def write(self, slots: Sequence[SlotId], positions: Sequence[Position], kv: Buffer) -> None:
        num_bytes = len(slots) * self.spec.token_bytes
        if len(positions) != len(slots) or len(kv) != num_bytes:
            raise SpecError(
                f"write: {len(slots)} slots, {len(positions)} positions and {len(kv)} bytes of KV: "
                f"give {len(slots)} positions and {num_bytes} bytes"
            )
        lists = np.array(slots, np.int32), np.array(positions, np.int32)
        self.cache = self._writer(self.cache, *lists, _contiguous(kv))

    def move(self, moves: Sequence[Move]) -> None:
        if not moves:
            return
        _, sources, destinations = (np.array(column, np.int32) for column in zip(*moves, strict=True))
        self.cache = self._mover(self.cache, sources, destinations)

    def set_row(self, row: int, block_ids: Sequence[BlockId], live_words: Sequence[int]) -> None:
        width = self.spec.num_blocks - 1
        ids = pad(np.asarray(block_ids, np.int32), width, NULL_BLOCK_ID)
        words = pad(self._encode(live_words), width, 0).ravel()
        self.tables = device_tables.set_row(self.tables, row, len(block_ids), ids, words)

    def set_words(self, row: int, indices: Sequence[int], live_words: Sequence[int]) -> None:
        columns, words = np.asarray(indices, np.int32), self._encode(live_words)
        for piece, size in chunks(len(columns), INDEX_SIZES):
            indices_padded = pad(columns[piece], size, self.spec.num_blocks)
            self.tables = device_tables.set_words(self.tables, row, indices_padded, pad(words[piece], size, 0))

    def set_free(self, block_ids: Sequence[BlockId], free: bool) -> None:
        ids = np.asarray(block_ids, np.int32)
        for piece, size in chunks(len(ids), INDEX_SIZES):
            self.tables = device_tables.set_free(self.tables, pad(ids[piece], size, self.spec.num_blocks), free)

    # -- reading -----------------------------------------------------------------------------------------------------

    def attend(self, row: int, q: Buffer, query_positions: Sequence[Position]) -> Attention:
        spec, layout = self.spec, self._layout(row)
        shape = (len(query_positions), spec.num_layers, spec.num_query_heads, spec.head_size)
        queries, places = np.frombuffer(_contiguous(q), np.float32), np.asarray(query_positions, np.int32)
        out, mass = attend_row(
            spec, self.cache, self.tables, row, len(layout.block_ids), queries.reshape(shape), places
        )
        return Attention(_floats(out), tuple(layout.positions.tolist()), _floats(mass[layout.live]))

    def read_row(self, row: int) -> RequestObservation:
        layout = self._layout(row)
        return RequestObservation(
            block_ids=tuple(layout.block_ids.tolist()),
            live_words=tuple(int.from_bytes(words.tobytes(), "little") for words in layout.words),
            positions=tuple(layout.positions.tolist()),
            kv=self._read_kv(layout.slots),
            fingerprint=self._fingerprint(layout.slots),
        )

    def fingerprint_row(self, row: int) -> str:
        """16 hex digits over the live tokens of a row, from the bits that lie in the pool now."""
        return self._fingerprint(self._layout(row).slots)

    def read_free(self) -> frozenset[BlockId]:
        return frozenset(np.flatnonzero(self.tables.free_flags).tolist())  # keeps no view: one would undo donation

    def _layout(self, row: int) -> _Layout:
        block_size = self.spec.block_size
        device_row = device_tables.read_row(self.tables, self.cache.positions, row, block_size=block_size)
        block_ids, num_blocks, words, positions = (np.asarray(part) for part in device_row)
        block_ids = block_ids[:num_blocks]
        words = words.reshape(-1, self._words_per_block)[:num_blocks]
        bits = np.unpackbits(words.astype("<u4").view(np.uint8), axis=1, count=block_size, bitorder="little")
        live = bits.ravel().astype(np.bool_)
        slots = (block_ids[:, None] * block_size + np.arange(block_size, dtype=np.int32)).ravel()
        return _Layout(block_ids, words, live, slots[live], positions[: len(live)][live])

    def _read_kv(self, slots: _Ints) -> tuple[bytes, ...]:
        tokens: list[bytes] = []
        size = self.spec.token_bytes
        for piece, padded in chunks(len(slots), self._sizes):
            data = np.asarray(read_tokens(self.cache, pad(slots[piece], padded, 0))).tobytes()
            tokens += [data[start : start + size] for start in range(0, (piece.stop - piece.start) * size, size)]
        return tuple(tokens)

    def _fingerprint(self, slots: _Ints) -> str:
        total: jax.Array | npt.NDArray[np.uint32] = np.zeros(len(SALTS), np.uint32)
        for piece, size in chunks(len(slots), self._sizes):
            padded = pad(slots[piece], size, 0)
            total = fingerprint.add_tokens(total, self.cache, self._weights, padded, piece.stop - piece.start)
        return "".join(f"{half:08x}" for half in reversed(np.asarray(total).tolist()))

    def _encode(self, live_words: Sequence[int]) -> npt.NDArray[np.uint32]:
        """``[len(live_words), words_per_block]``, low half first."""
        data = b"".join(word.to_bytes(4 * self._words_per_block, "little") for word in live_words)
        return np.frombuffer(data, "<u4").reshape(len(live_words), self._words_per_block)


def _contiguous(data: Buffer) -> Buffer:
    return data if memoryview(data).c_contiguous else bytes(data)


def _floats(values: npt.NDArray[np.float32]) -> "array[float]":
    return array("f", values.tobytes())
