"""Token moves alone, of the whole model's layers: what a call costs, and what each byte."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from vtoken.executor import KVSpec
from vtoken.paged_executor import KVStore
from vtoken.types import Move
from vtoken_bench.executors.comparison import Clock, Comparison, Elapsed, GateError, Samples
from vtoken_bench.executors.sides import Side
from vtoken_bench.timing import Spread, interleaved

__all__ = ["compare_moves", "row_copies"]


def compare_moves(
    jax: Side, torch: Side, spec: KVSpec, counts: Sequence[int], clock: Clock,
    memcpy: Callable[[int], Callable[[], object]], repeats: int, params: dict[str, Any], with_rows: bool,
    on_round: Callable[[], object] = lambda: None,
) -> list[Comparison]:  # fmt: skip
    """Times moves of ``counts`` tokens each between random slots, in both executors' stores.

    Beside them a call of one move, one contiguous copy of as many bytes and, ``with_rows``, NumPy's copy of as many
    rows between the same slots of as many arrays. ``jax/memcpy`` and ``torch/memcpy`` are what a byte costs each, as a
    multiple of that copy, without the call.

    Raises:
        GateError: the stores do not hold the same after the moves of the first count; nothing was timed.
    """
    rng = np.random.default_rng(0)
    for side in (jax, torch):
        side.executor.allocate(spec)
    planes = _planes(spec) if with_rows else []
    works: list[tuple[list[Move], Callable[[], object], Callable[[], object]]] = []
    samples: list[Samples] = []
    for count in counts:
        src, dst = rng.permutation(np.arange(spec.block_size, spec.num_slots))[: 2 * count].reshape(2, -1)
        moves = [Move(at, *slots) for at, slots in enumerate(zip(src.tolist(), dst.tolist(), strict=True))]
        if not works:
            _gate((jax, torch), spec, moves)
        works.append((moves, memcpy(count * spec.token_bytes), row_copies(planes, src, dst)))
        samples.append(_samples(with_rows))
    one = works[0][0][:1]

    def take_all() -> float:
        calls = [clock(partial(_move, side, one)) for side in (jax, torch)]
        for (moves, copy, rows), into in zip(works, samples, strict=True):
            for side, times in ((jax, into.jax), (torch, into.torch)):
                times.append(clock(partial(_move, side, moves)))
            for part, call in zip(into.parts["calls"], calls, strict=True):
                part.append(call)
            into.parts["memcpy"][0].append(clock(copy))
            if with_rows:
                into.others["rows"].append(clock(rows))
        return 0.0

    interleaved([take_all], repeats, on_round)
    for each in samples:
        each.drop_first()
    return [_row(each, {"moves": count, **params}) for count, each in zip(counts, samples, strict=True)]


def _row(samples: Samples, params: dict[str, Any]) -> Comparison:
    """With what the moves take beyond a call of one, over one contiguous copy of as many bytes, of both."""
    copies, calls = samples.parts["memcpy"][0], samples.parts["calls"]
    over = {
        f"{side}/memcpy": Spread.of(
            [max(0.0, time.us - call.us) / copy.us for time, call, copy in zip(times, made, copies, strict=True)]
        )
        for side, times, made in zip(("jax", "torch"), (samples.jax, samples.torch), calls, strict=True)
    }
    row = samples.row("store_move_us", params)
    return replace(row, ratios={**row.ratios, **over})


def _samples(with_rows: bool) -> Samples:
    copies = list[Elapsed]()
    parts = {"calls": (list[Elapsed](), list[Elapsed]()), "memcpy": (copies, copies)}
    return Samples(parts=parts, others={"rows": []} if with_rows else {})


def row_copies(planes: Sequence[Any], src: Any, dst: Any) -> Callable[[], object]:
    """Copies the rows ``src`` to ``dst`` in each of ``planes``."""

    def copy() -> None:
        for plane in planes:
            plane[dst] = plane[src]

    return copy


def _planes(spec: KVSpec) -> list[Any]:
    """Arrays of one opaque element a token, so that NumPy copies rows whole."""
    row = np.dtype((np.void, spec.num_kv_heads * spec.head_size * spec.item_bytes))
    return [np.ones(spec.num_slots * row.itemsize, np.uint8).view(row) for _ in range(2 * spec.num_layers)]


def _move(side: Side, moves: Sequence[Move]) -> None:
    _store(side).move(moves)
    side.settle()


def _store(side: Side) -> KVStore:
    store: KVStore = side.executor.store  # type: ignore[attr-defined]
    return store


def _gate(sides: Sequence[Side], spec: KVSpec, moves: Sequence[Move]) -> None:
    """Writes tokens where the moves begin, moves them, and reads them where they end."""
    kv = np.random.default_rng(1).bytes(len(moves) * spec.token_bytes)
    words = [0] * spec.num_blocks
    for move in moves:
        words[move.dst_slot // spec.block_size] |= 1 << move.dst_slot % spec.block_size
    held = {move.dst_slot: kv[at * spec.token_bytes :][: spec.token_bytes] for at, move in enumerate(moves)}
    expected = tuple(held[slot] for slot in sorted(held))
    for store in map(_store, sides):
        store.write([move.src_slot for move in moves], range(len(moves)), kv)
        store.move(moves)
        store.set_row(0, range(1, spec.num_blocks), words[1:])
        if store.read_row(0).kv != expected:
            raise GateError(f"{type(store).__name__}: tokens do not lie where {len(moves)} moves bring them")
        store.set_row(0, (), ())
