"""Tiny worlds: block size 4, and KV bytes that name request, position and element, so that a wrong copy is seen."""

import struct
from collections.abc import Callable, Mapping, Sequence
from math import isnan, nan
from typing import Any

import pytest
from hypothesis import settings

from vtoken.executor import KVSpec
from vtoken.invariants import check_all
from vtoken.policies import Choice
from vtoken.reclamation import Planner, ReclamationPlan, get_planner
from vtoken.reference import ReferenceExecutor
from vtoken.request_table import RequestTable
from vtoken.types import Position, ReqId

settings.register_profile("vtoken", deadline=None, derandomize=True)
settings.load_profile("vtoken")


class World(ReferenceExecutor):
    """The reference executor with made-up KV, requests laid out from pictures, and one check of everything."""

    def __init__(self, **spec: Any) -> None:
        shape = {"num_layers": 2, "num_kv_heads": 2, "num_query_heads": 4, "head_size": 1, "dtype": "float32"}
        self.allocate(KVSpec(**{**shape, "block_size": 4, "num_blocks": 17, **spec}))
        self._num_admitted = 0
        self._author: dict[ReqId, list[int]] = {}  # who wrote each position: a fork inherits its parent's tokens

    def lay(self, req_id: ReqId, picture: str) -> RequestTable:
        """A request from a picture of its table slots up to the cursor: x live, d doomed, . dead."""
        slots = picture.replace(" ", "").replace("|", "")
        self.admit(req_id)
        self.grow(req_id, len(slots))
        self.kill(req_id, [i for i, mark in enumerate(slots) if mark == "."])
        self.doom(req_id, [i for i, mark in enumerate(slots) if mark == "d"])
        return self.tables[req_id]

    def admit(self, req_id: ReqId) -> None:
        super().admit(req_id)
        self._author[req_id] = []

    def fork_prefix(self, parent_id: ReqId, child_id: ReqId, num_tokens: int) -> None:
        super().fork_prefix(parent_id, child_id, num_tokens)
        self._author[child_id] = self._author[parent_id][:num_tokens]

    def grow(self, req_id: ReqId, num_tokens: int) -> None:
        """Appends the next tokens."""
        self.append(req_id, num_tokens, self._write(req_id, num_tokens))

    def recycle_next(self, req_id: ReqId) -> None:
        """Writes the next token over the next doomed one."""
        self.recycle(req_id, self._write(req_id, 1))

    def plan(self, planner: str | Planner, req_id: ReqId) -> ReclamationPlan | None:
        """What a planner makes of a request now."""
        chosen = get_planner(planner) if isinstance(planner, str) else planner
        return chosen.plan(self.tables[req_id], self.pool)

    def reclaim(self, planner: str | Planner, req_id: ReqId) -> ReclamationPlan:
        """Plans, which must succeed, and launches."""
        plan = self.plan(planner, req_id)
        assert plan is not None
        self.launch(plan)
        return plan

    def kv_of(self, req_id: ReqId, position: Position) -> bytes:
        """The bytes that a token was written with."""
        return self._kv(self._author[req_id][position], position)

    def query(self, num_queries: int = 1) -> bytes:
        """Queries for ``attend``."""
        count = num_queries * self.spec.query_elements
        return struct.pack(f"={count}f", *(i / count for i in range(count)))

    def check(self) -> None:
        """INV-2, 6, 8; the store shows what the table says; and every live token has the bytes it was born with."""
        check_all(self.tables, self.pool)
        seen = self.observe()
        assert seen.free_block_ids == set(self.pool.free_block_ids())
        assert seen.requests.keys() == self.tables.keys()
        for req_id, table in self.tables.items():
            request = seen.requests[req_id]
            assert request.block_ids == tuple(table.block_ids)
            assert request.live_words == tuple(table.live_words)
            assert request.positions == tuple(table.live_positions())
            assert request.kv == tuple(self.kv_of(req_id, position) for position in request.positions)

    def _write(self, req_id: ReqId, num_tokens: int) -> bytes:
        authors = self._author.setdefault(req_id, [])
        first = self.tables[req_id].num_computed_tokens
        del authors[first:]
        self._num_admitted += 1
        authors += [self._num_admitted] * num_tokens
        return b"".join(self._kv(self._num_admitted, position) for position in range(first, first + num_tokens))

    def _kv(self, author: int, position: Position) -> bytes:
        count = self.spec.token_elements
        return struct.pack(f"<{count}f", *(author * 1024 + position + element / 16 for element in range(count)))


def draw_table(table: RequestTable) -> str:
    """Positions by table slot, blocks apart: ``0 . 2 3 | 4 _ _ _``; a dot is a hole, a line is not written yet."""
    size = table.block_size
    marks = ["." if slot < table.cursor else "_" for slot in range(len(table.block_ids) * size)]
    for slot in table.live_table_slots():
        marks[slot] = str(table.position_at(slot))
    return " | ".join(" ".join(marks[first : first + size]) for first in range(0, len(marks), size))


def copy_state(table: RequestTable) -> Mapping[str, Any]:
    """Everything that a table holds, to see whether a call changed it."""
    return {name: value if isinstance(value, int | str | None) else list(value) for name, value in vars(table).items()}


def choose_as_a_device(
    positions: Sequence[int], mass: Sequence[float], rows: Sequence[Sequence[float]], choice: Choice
) -> list[int]:
    """What a device chooses, from the words of ``Choice`` alone; NaN is no mass yet."""
    scores = list(mass)
    if choice.score == "above_mean":
        scores = [nan if isnan(each) else 0.0 for each in mass]
        for row in rows:
            seen = [each for each in row if not isnan(each)]
            for i, each in enumerate(row):
                scores[i] += bool(seen) and each > sum(seen) / len(seen)

    def smoothed(place: int) -> float:
        near = [
            score
            for position, score in zip(positions, scores, strict=True)
            if abs(position - place) <= choice.smooth // 2 and not isnan(score)
        ]
        return sum(near) / len(near)

    ranked = sorted(
        (smoothed(position) if choice.smooth > 1 else score, position)
        for position, score in zip(positions, scores, strict=True)
        if not isnan(score) and any(low <= position < high for low, high in choice.spans)
    )
    return sorted(position for _, position in ranked[: choice.count])


@pytest.fixture(scope="session")
def make_world() -> Callable[..., World]:
    """Builds a ``World``; keywords replace parts of its ``KVSpec``."""
    return World


@pytest.fixture(scope="session")
def draw() -> Callable[[RequestTable], str]:
    return draw_table


@pytest.fixture(scope="session")
def state_of() -> Callable[[RequestTable], Mapping[str, Any]]:
    return copy_state


@pytest.fixture(scope="session")
def choose() -> Callable[..., list[Position]]:
    """(positions, mass, mass rows, choice) -> victims, as a device must choose them."""
    return choose_as_a_device
