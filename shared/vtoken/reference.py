"""The reference executor: plain lists, the standard library, and no cleverness. The first to ask when two disagree."""

import struct
from array import array
from collections.abc import Iterator, Sequence
from math import exp, fsum

from vtoken.executor import Attention, Buffer, KVSpec, RequestObservation
from vtoken.fingerprint import sequence_fingerprint
from vtoken.paged_executor import KVStore, PagedExecutor
from vtoken.types import BlockId, Move, Position, SlotId, set_bits

__all__ = ["ListStore", "ReferenceExecutor"]


class ReferenceExecutor(PagedExecutor):
    """KV bytes in a list of slots. Slow and obvious."""

    name = "reference"

    def _make_store(self, spec: KVSpec) -> KVStore:
        return ListStore(spec)


class ListStore:
    """``kv[slot]`` is one token's bytes; ``positions[slot]`` its position; rows hold block ids and live words."""

    def __init__(self, spec: KVSpec) -> None:
        self.spec = spec
        self.kv: list[bytes] = [b""] * spec.num_slots
        self.positions: list[Position] = [0] * spec.num_slots
        self.block_table: list[list[BlockId]] = [[] for _ in range(spec.max_num_reqs)]
        self.live_words: list[list[int]] = [[] for _ in range(spec.max_num_reqs)]
        self.is_free = [False] * spec.num_blocks

    def write(self, slots: Sequence[SlotId], positions: Sequence[Position], kv: Buffer) -> None:
        size = self.spec.token_bytes
        for index, (slot, position) in enumerate(zip(slots, positions, strict=True)):
            self.kv[slot] = bytes(kv[index * size : (index + 1) * size])
            self.positions[slot] = position

    def move(self, moves: Sequence[Move]) -> None:
        for _, src_slot, dst_slot in moves:
            self.kv[dst_slot] = self.kv[src_slot]
            self.positions[dst_slot] = self.positions[src_slot]

    def set_row(self, row: int, block_ids: Sequence[BlockId], live_words: Sequence[int]) -> None:
        self.block_table[row] = list(block_ids)
        self.live_words[row] = list(live_words)

    def set_words(self, row: int, indices: Sequence[int], live_words: Sequence[int]) -> None:
        for index, word in zip(indices, live_words, strict=True):
            self.live_words[row][index] = word

    def set_free(self, block_ids: Sequence[BlockId], free: bool) -> None:
        for block in block_ids:
            self.is_free[block] = free

    def read_row(self, row: int) -> RequestObservation:
        slots = list(self._live_slots(row))
        return RequestObservation(
            block_ids=tuple(self.block_table[row]),
            live_words=tuple(self.live_words[row]),
            positions=tuple(self.positions[slot] for slot in slots),
            kv=tuple(self.kv[slot] for slot in slots),
            fingerprint=self.fingerprint_row(row),
        )

    def fingerprint_row(self, row: int) -> str:
        return sequence_fingerprint((self.positions[slot], self.kv[slot]) for slot in self._live_slots(row))

    def read_free(self) -> frozenset[BlockId]:
        return frozenset(block for block, free in enumerate(self.is_free) if free)

    def attend(self, row: int, q: Buffer, query_positions: Sequence[Position]) -> Attention:
        spec = self.spec
        slots = list(self._live_slots(row))
        positions = [self.positions[slot] for slot in slots]
        tokens = [_decode(self.kv[slot], spec) for slot in slots]
        queries = _rows(struct.unpack(f"={len(q) // 4}f", q), spec.head_size)
        per_query = spec.num_layers * spec.num_query_heads
        out = array("f")
        mass = [0.0] * len(slots)
        for index, row_of_q in enumerate(queries):
            query_position = query_positions[index // per_query]
            layer, head = divmod(index % per_query, spec.num_query_heads)
            kv_head = head // (spec.num_query_heads // spec.num_kv_heads)
            seen = [i for i, position in enumerate(positions) if position <= query_position]
            keys = [tokens[i][(layer * 2) * spec.num_kv_heads + kv_head] for i in seen]
            values = [tokens[i][(layer * 2 + 1) * spec.num_kv_heads + kv_head] for i in seen]
            weights = _softmax([_dot(row_of_q, key) * spec.head_size**-0.5 for key in keys])
            out.extend(fsum(w * v[dim] for w, v in zip(weights, values, strict=True)) for dim in range(spec.head_size))
            for i, weight in zip(seen, weights, strict=True):
                mass[i] += weight / spec.num_layers
        return Attention(out, tuple(positions), array("f", mass))

    def _live_slots(self, row: int) -> Iterator[SlotId]:
        size = self.spec.block_size
        for block, word in zip(self.block_table[row], self.live_words[row], strict=True):
            yield from set_bits(word, block * size)


def _decode(kv: bytes, spec: KVSpec) -> list[Sequence[float]]:
    """A token's heads in canonical order: ``[num_layers * 2 * num_kv_heads]`` rows of ``head_size`` floats."""
    if spec.dtype == "bfloat16":  # the upper half of a float32
        kv = b"".join(b"\0\0" + kv[i : i + 2] for i in range(0, len(kv), 2))
    code = "e" if spec.dtype == "float16" else "f"
    return _rows(struct.unpack(f"<{spec.token_elements}{code}", kv), spec.head_size)


def _rows(values: Sequence[float], width: int) -> list[Sequence[float]]:
    return [values[i : i + width] for i in range(0, len(values), width)]


def _dot(a: Sequence[float], b: Sequence[float]) -> float:
    return fsum(x * y for x, y in zip(a, b, strict=True))


def _softmax(logits: Sequence[float]) -> list[float]:
    if not logits:
        return []
    highest = max(logits)
    weights = [exp(logit - highest) for logit in logits]
    total = fsum(weights)
    return [weight / total for weight in weights]
