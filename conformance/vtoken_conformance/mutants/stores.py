"""Mutants whose arrays or kernels are wrong, while their bookkeeping is right."""

import struct
from array import array
from collections.abc import Sequence
from dataclasses import replace

from vtoken.executor import Attention, Buffer, KVSpec
from vtoken.fingerprint import sequence_fingerprint
from vtoken.paged_executor import KVStore
from vtoken.reference import ListStore, ReferenceExecutor
from vtoken.types import Move, Position, SlotId

__all__ = ["STORE_MUTANTS"]


class WrongSlot(ListStore):
    """The newest token is written one slot before its own."""

    def write(self, slots: Sequence[SlotId], positions: Sequence[Position], kv: Buffer) -> None:
        super().write([*slots[:-1], slots[-1] - 1], positions, kv)


class LostToken(ListStore):
    """The last token of a write of several is not written."""

    def write(self, slots: Sequence[SlotId], positions: Sequence[Position], kv: Buffer) -> None:
        count = max(1, len(slots) - 1)
        super().write(slots[:count], positions[:count], kv[: count * self.spec.token_bytes])


class SwappedKV(ListStore):
    """Attention takes values for keys."""

    def attend(self, row: int, q: Buffer, query_positions: Sequence[Position]) -> Attention:
        stored, half = self.kv, self.spec.token_bytes // self.spec.num_layers // 2
        self.kv = [b"".join(kv[at ^ half : (at ^ half) + half] for at in range(0, len(kv), half)) for kv in stored]
        seen = super().attend(row, q, query_positions)
        self.kv = stored
        return seen


class StaleMask(ListStore):
    """A killed token stays in the mask until its row is rewritten."""

    def set_words(self, row: int, indices: Sequence[int], live_words: Sequence[int]) -> None:
        old = self.live_words[row]
        super().set_words(row, indices, [old[i] | word for i, word in zip(indices, live_words, strict=True)])


class SignBitLost(ListStore):
    """Live words pass through a signed integer of 32 bits."""

    def set_row(self, row: int, block_ids: Sequence[int], live_words: Sequence[int]) -> None:
        super().set_row(row, block_ids, [word & ~(1 << 31) for word in live_words])


class RoundedMove(ListStore):
    """Moves go through arithmetic on floats, which quietens a signalling NaN."""

    def move(self, moves: Sequence[Move]) -> None:
        super().move(moves)
        code = f"<{self.spec.token_elements}{'f' if self.spec.item_bytes == 4 else 'e'}"
        for _, _, slot in moves:
            self.kv[slot] = struct.pack(code, *struct.unpack(code, self.kv[slot]))


class FirstLayerMoved(ListStore):
    """Moves carry the first layer alone."""

    def move(self, moves: Sequence[Move]) -> None:
        layer_bytes = self.spec.token_bytes // self.spec.num_layers
        behind = {
            slot: self.kv[slot][layer_bytes:] or bytes(self.spec.token_bytes - layer_bytes) for _, _, slot in moves
        }
        super().move(moves)
        for slot, rest in behind.items():
            self.kv[slot] = self.kv[slot][:layer_bytes] + rest


class PositionLeftBehind(ListStore):
    """KV moves, its position does not."""

    def move(self, moves: Sequence[Move]) -> None:
        positions = list(self.positions)
        super().move(moves)
        self.positions = positions


class NaNLeak(ListStore):
    """Dead slots are multiplied by a weight of zero, and zero times NaN is NaN."""

    def attend(self, row: int, q: Buffer, query_positions: Sequence[Position]) -> Attention:
        seen = super().attend(row, q, query_positions)
        size = self.spec.block_size
        slots = [block * size + offset for block in self.block_table[row] for offset in range(size)]
        code = f"<{self.spec.token_elements}f"
        leak = sum(0.0 * number for slot in slots if self.kv[slot] for number in struct.unpack(code, self.kv[slot]))
        return replace(seen, out=array("f", [number + leak for number in seen.out]))


class CausalByIndex(ListStore):
    """A query's place among the live tokens in memory, not its position, says what it sees."""

    def attend(self, row: int, q: Buffer, query_positions: Sequence[Position]) -> Attention:
        stored, slots = self.positions, list(self._live_slots(row))
        self.positions = list(stored)
        for index, slot in enumerate(slots):
            self.positions[slot] = index
        count, live = len(query_positions), len(slots)
        seen = super().attend(row, q, range(live - count, live))
        self.positions = stored
        return replace(seen, positions=tuple(stored[slot] for slot in slots))


class MassOnKVHeads(ListStore):
    """Mass is averaged over the query heads of each KV head."""

    def attend(self, row: int, q: Buffer, query_positions: Sequence[Position]) -> Attention:
        seen = super().attend(row, q, query_positions)
        group = self.spec.num_query_heads // self.spec.num_kv_heads
        return replace(seen, mass=array("f", [mass / group for mass in seen.mass]))


class Unscaled(ListStore):
    """The logits lack their factor ``head_size ** -0.5``."""

    def attend(self, row: int, q: Buffer, query_positions: Sequence[Position]) -> Attention:
        numbers = struct.unpack(f"={len(q) // 4}f", q)
        scaled = [number * self.spec.head_size**0.5 for number in numbers]
        return super().attend(row, struct.pack(f"={len(scaled)}f", *scaled), query_positions)


class InterleavedHeads(ListStore):
    """Query head h reads KV head ``h % num_kv_heads``."""

    def attend(self, row: int, q: Buffer, query_positions: Sequence[Position]) -> Attention:
        heads, width = self.spec.num_query_heads, self.spec.head_size * 4
        order = sorted(range(heads), key=lambda head: head % self.spec.num_kv_heads)
        rows = [q[at : at + width] for at in range(0, len(q), width)]
        taken = [rows[at // heads * heads + order[at % heads]] for at in range(len(rows))]
        seen = super().attend(row, b"".join(taken), query_positions)
        size = self.spec.head_size
        out = array("f", seen.out)
        for at in range(len(rows)):
            goes_to = at // heads * heads + order[at % heads]
            out[goes_to * size : (goes_to + 1) * size] = seen.out[at * size : (at + 1) * size]
        return replace(seen, out=out)


class FingerprintByIndex(ListStore):
    """The fingerprint takes a token's place in memory for its position."""

    def fingerprint_row(self, row: int) -> str:
        return sequence_fingerprint((index, self.kv[slot]) for index, slot in enumerate(self._live_slots(row)))


def _executor_on(store: type[ListStore]) -> type[ReferenceExecutor]:
    class Mutant(ReferenceExecutor):
        def _make_store(self, spec: KVSpec) -> KVStore:
            return store(spec)

    Mutant.__name__ = Mutant.__qualname__ = store.__name__
    Mutant.__doc__ = store.__doc__
    return Mutant


STORE_MUTANTS = {
    store.__name__: _executor_on(store)
    for store in (
        CausalByIndex,
        FingerprintByIndex,
        FirstLayerMoved,
        InterleavedHeads,
        LostToken,
        MassOnKVHeads,
        NaNLeak,
        PositionLeftBehind,
        RoundedMove,
        SignBitLost,
        StaleMask,
        SwappedKV,
        Unscaled,
        WrongSlot,
    )
}
"""Executors on these stores, by name."""
