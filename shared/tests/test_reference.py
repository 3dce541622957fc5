"""Attention of the reference executor (SPEC A), against a dense computation over the kept positions."""

import math
import random
import struct
from collections.abc import Callable, Sequence
from operator import mul
from typing import Any

import pytest

from vtoken.executor import KVSpec
from vtoken.fingerprint import sequence_fingerprint
from vtoken.reclamation import get_planner
from vtoken.reference import ReferenceExecutor

TOLERANCE = 1e-5  # A-4, float32

Floats = Sequence[float]
MakeWorld = Callable[..., Any]


class Dense:
    """One request in the reference executor, and its KV once more as plain lists by position."""

    def __init__(self, seed: int = 0, **shape: Any) -> None:
        options = {"num_layers": 2, "num_kv_heads": 2, "num_query_heads": 4, "head_size": 3, "dtype": "float32"}
        self.spec = KVSpec(**{**options, "block_size": 4, "num_blocks": 40, **shape})
        self.executor = ReferenceExecutor()
        self.executor.allocate(self.spec)
        self.executor.admit("a")
        self.random = random.Random(seed)
        self.kv: dict[int, list[float]] = {}

    def grow(self, num_tokens: int) -> None:
        first = len(self.kv)
        for position in range(first, first + num_tokens):
            self.kv[position] = self._floats(self.spec.token_elements)
        data = [value for position in range(first, first + num_tokens) for value in self.kv[position]]
        self.executor.append("a", num_tokens, struct.pack(f"<{len(data)}f", *data))

    def query(self, num_queries: int) -> list[float]:
        return self._floats(num_queries * self.spec.query_elements)

    def _floats(self, count: int) -> list[float]:
        values = [self.random.gauss(0, 1) for _ in range(count)]
        return list(struct.unpack(f"<{count}f", struct.pack(f"<{count}f", *values)))

    def expected(self, q: Floats, first: int, live: set[int]) -> tuple[list[float], dict[int, float]]:
        """Output and mass by the words of A-1 and A-3; the queries are the positions from ``first`` on."""
        spec = self.spec
        out: list[float] = []
        mass = dict.fromkeys(live, 0.0)
        for index in range(len(q) // spec.head_size):
            n, rest = divmod(index, spec.num_layers * spec.num_query_heads)
            layer, head = divmod(rest, spec.num_query_heads)
            kv_head = head * spec.num_kv_heads // spec.num_query_heads
            row = q[index * spec.head_size : (index + 1) * spec.head_size]
            seen = sorted(position for position in live if position <= first + n)
            keys = [self._head(p, layer, 0, kv_head) for p in seen]
            logits = [sum(map(mul, row, key)) / math.sqrt(spec.head_size) for key in keys]
            total = sum(math.exp(logit) for logit in logits)
            weights = [math.exp(logit) / total for logit in logits]
            for dim in range(spec.head_size):
                out.append(sum(w * self._head(p, layer, 1, kv_head)[dim] for w, p in zip(weights, seen, strict=True)))
            for position, weight in zip(seen, weights, strict=True):
                mass[position] += weight / spec.num_layers
        return out, mass

    def _head(self, position: int, layer: int, is_value: int, kv_head: int) -> Floats:
        start = ((layer * 2 + is_value) * self.spec.num_kv_heads + kv_head) * self.spec.head_size
        return self.kv[position][start : start + self.spec.head_size]

    def check(self, num_queries: int) -> None:
        live = set(self.executor.tables["a"].live_positions())
        q = self.query(num_queries)
        seen = self.executor.attend("a", struct.pack(f"={len(q)}f", *q), num_queries)
        out, mass = self.expected(q, len(self.kv) - num_queries, live)
        scale = max(map(abs, out))
        assert max(abs(a - b) for a, b in zip(seen.out, out, strict=True)) <= TOLERANCE * scale
        assert set(seen.positions) == live
        assert all(abs(m - mass[p]) <= 1e-5 for p, m in zip(seen.positions, seen.mass, strict=True))
        assert sum(seen.mass) == pytest.approx(num_queries * self.spec.num_query_heads, rel=1e-5)


@pytest.mark.parametrize("num_queries", [1, 3, 7])
def test_attention_is_exact_while_all_tokens_are_live(num_queries: int) -> None:
    dense = Dense()
    dense.grow(7)
    dense.check(num_queries)


@pytest.mark.parametrize(("num_kv_heads", "num_query_heads"), [(1, 1), (1, 4), (2, 2), (3, 9)])
def test_query_heads_read_their_kv_head(num_kv_heads: int, num_query_heads: int) -> None:
    dense = Dense(num_kv_heads=num_kv_heads, num_query_heads=num_query_heads)
    dense.grow(6)
    dense.check(2)


@pytest.mark.parametrize("planner", ["fill", "evacuate", "release", None])
def test_attention_sees_the_live_tokens_wherever_they_lie(planner: str | None) -> None:
    dense = Dense()
    dense.grow(30)
    executor = dense.executor
    executor.kill("a", [0, 1, 2, 3, 5, 6, 8, 11, 13, 14, 16, 17, 18, 27])
    if planner:
        plan = get_planner(planner).plan(executor.tables["a"], executor.pool)
        assert plan is not None
        executor.launch(plan)
    dense.check(1)
    dense.grow(5)
    dense.check(5)


@pytest.mark.parametrize("budget", [60, 50, 40, 32])
def test_queries_of_a_chunk_after_an_eviction_are_causal_by_position(budget: int) -> None:
    """New tokens lie behind moved ones in memory; a mask by physical index would be wrong."""
    dense = Dense(seed=budget)
    dense.grow(64)
    executor = dense.executor
    executor.kill("a", sorted(dense.random.sample(range(64), 64 - budget)))
    plan = get_planner("fill").plan(executor.tables["a"], executor.pool)
    assert plan is not None
    executor.launch(plan)
    dense.grow(6)
    table = executor.tables["a"]
    assert table.live_positions()[-6:] == list(range(64, 70))
    assert table.live_positions() != sorted(table.live_positions())
    dense.check(6)


def test_a_doomed_token_is_attended_to_and_a_recycled_one_is_not() -> None:
    dense = Dense()
    dense.grow(8)
    dense.executor.doom("a", [2])
    dense.check(1)
    dense.kv[8] = dense._floats(dense.spec.token_elements)
    dense.executor.recycle("a", struct.pack(f"<{dense.spec.token_elements}f", *dense.kv[8]))
    assert dense.executor.tables["a"].live_positions() == [0, 1, 8, 3, 4, 5, 6, 7]
    dense.check(1)
    dense.check(3)  # the query at position 6 lies behind position 8 and must not see it


def test_a_query_without_anything_to_see_gives_zeros_and_no_mass() -> None:
    dense = Dense()
    dense.grow(4)
    dense.executor.kill("a", [0, 1, 2, 3])
    q = struct.pack(f"={dense.spec.query_elements}f", *dense.query(1))
    seen = dense.executor.attend("a", q)
    assert list(seen.out) == [0.0] * dense.spec.query_elements
    assert (seen.positions, list(seen.mass)) == ((), [])


def test_a_query_sees_no_later_position_though_it_is_live() -> None:
    dense = Dense()
    dense.grow(3)
    dense.executor.kill("a", [0, 1])
    q = struct.pack(f"={2 * dense.spec.query_elements}f", *dense.query(2))
    seen = dense.executor.attend("a", q, 2)  # positions 1 and 2; 1 is dead, and sees nothing
    half = dense.spec.query_elements
    assert list(seen.out[:half]) == [0.0] * half
    assert any(seen.out[half:])
    assert sum(seen.mass) == pytest.approx(dense.spec.num_query_heads)


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
def test_what_a_dead_slot_holds_never_reaches_the_output(poison: float) -> None:
    dense = Dense()
    dense.grow(6)
    count = dense.spec.token_elements
    dense.executor.append("a", 2, struct.pack(f"<{2 * count}f", *[poison] * 2 * count))
    dense.kv[6] = dense.kv[7] = []
    dense.executor.kill("a", [6, 7])
    dense.grow(1)
    dense.check(1)


@pytest.mark.parametrize(("dtype", "code"), [("bfloat16", None), ("float16", "e"), ("float32", "f")])
def test_kv_is_read_in_its_dtype(dtype: str, code: str | None) -> None:
    spec = KVSpec(num_layers=1, num_kv_heads=1, num_query_heads=1, head_size=2, dtype=dtype, block_size=4, num_blocks=3)  # type: ignore[arg-type]
    executor = ReferenceExecutor()
    executor.allocate(spec)
    executor.admit("a")
    values = [0.0, 0.0, 1.5, -2.0]  # key, then value
    if code is None:
        kv = b"".join(struct.pack("<f", value)[2:] for value in values)
    else:
        kv = struct.pack(f"<4{code}", *values)
    executor.append("a", 1, kv)
    assert list(executor.attend("a", struct.pack("=2f", 1, 1)).out) == [1.5, -2.0]


def test_large_logits_do_not_overflow() -> None:
    spec = KVSpec(
        num_layers=1, num_kv_heads=1, num_query_heads=1, head_size=1, dtype="float32", block_size=4, num_blocks=3
    )
    executor = ReferenceExecutor()
    executor.allocate(spec)
    executor.admit("a")
    executor.append("a", 2, struct.pack("<4f", 1e4, 1.0, -1e4, 5.0))
    seen = executor.attend("a", struct.pack("=f", 1e4))
    assert (list(seen.out), list(seen.mass)) == ([1.0], [1.0, 0.0])


def test_the_fingerprint_is_that_of_the_bytes_shown(make_world: MakeWorld) -> None:
    world = make_world()
    world.lay("a", "x.xx ..xx xx")
    before = world.fingerprint("a")
    seen = world.observe().requests["a"]
    assert seen.fingerprint == before == sequence_fingerprint(zip(seen.positions, seen.kv, strict=True))
    world.reclaim("fill", "a")
    assert world.fingerprint("a") == before
    world.kill("a", [9])
    assert world.fingerprint("a") != before


def test_a_stray_write_is_seen(make_world: MakeWorld) -> None:
    """What observe shows comes from the arrays, not from the table."""
    world = make_world()
    world.lay("a", "xxxx x")
    world.store.kv[4] = world.store.kv[5]
    with pytest.raises(AssertionError):
        world.check()
