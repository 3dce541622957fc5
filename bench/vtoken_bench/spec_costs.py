"""Costs of the spec in pure Python: tables, planners and the manager's check, with no executor.

The world: requests of one length that share a pool, every second token dead at random, nothing reclaimed yet.
"""

import tracemalloc
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from random import Random
from typing import NamedTuple, get_args

from vtoken.block_pool import BlockPool
from vtoken.config import Mode, VTokenConfig
from vtoken.errors import InvariantError
from vtoken.invariants import check_plan
from vtoken.reclamation import Planner, get_planner
from vtoken.reclamation.manager import ReclamationManager
from vtoken.request_table import RequestTable
from vtoken.types import BlockId, Position, cdiv
from vtoken_bench.timing import cpu_us

__all__ = ["MEMORY_BOUND_BYTES", "Cost", "Wear", "World", "bytes_per_token", "check_us", "costs", "plan_us"]

MEMORY_BOUND_BYTES = 16  # a token, SPEC T-7

_BLOCK_SIZE = 16
_CHECK_LENGTHS = (1024, 16384, 131072)
_LENGTH = 16384
_BATCH = 256
_SWEEPS = 10  # a sweep of checks alone is too short for the clock


class Cost(NamedTuple):
    """One thing to measure: name, bound in microseconds, parameters, and the measurement."""

    name: str
    bound_us: float
    params: Mapping[str, int | float | str]
    measure: Callable[[], float]


def costs(num_requests: int) -> list[Cost]:
    """Everything with a bound in microseconds, for so many requests."""
    found = []
    for length in _CHECK_LENGTHS:
        world = World(num_requests, length)
        for mode in get_args(Mode):
            found.append(Cost("check_us_per_request", 2, {"tokens": length, "mode": mode}, check_us(world, mode)))
    world, wear = World(num_requests, _LENGTH), Wear(num_requests, _LENGTH)
    for name in ("fill", "evacuate"):
        found.append(Cost("plan_us_per_move", 2, {"planner": name}, plan_us(world, get_planner(name))))
    for batch, evict_bound, append_bound in ((_BATCH, 1, 0.5), (1, 3, 3)):
        found.append(Cost("evict_us", evict_bound, {"batch": batch}, partial(wear.evict_us, batch)))
        found.append(Cost("append_us", append_bound, {"batch": batch}, partial(wear.append_us, batch)))
    return found


class World:
    """Requests of ``num_tokens`` tokens, the same half of each dead, and as many free blocks as they hold."""

    def __init__(self, num_requests: int, num_tokens: int, block_size: int = _BLOCK_SIZE) -> None:
        held = cdiv(num_tokens, block_size)
        self.pool = BlockPool(2 * num_requests * held + 1)
        self.tables = [
            _grown_table(f"r{index}", block_size, self.pool.allocate(held), num_tokens, step=num_tokens)
            for index in range(num_requests)
        ]


def _grown_table(req_id: str, block_size: int, blocks: list[BlockId], num_tokens: int, step: int) -> RequestTable:
    """A table that got its tokens ``step`` at a time, every second one dead at random."""
    table = RequestTable(req_id, block_size)
    for start in range(0, num_tokens, step):
        total = min(start + step, num_tokens)
        table.sync_new_tokens(blocks[: cdiv(total, block_size)], total)
    table.evict_tokens(_half(num_tokens))
    return table


@cache
def _half(num_tokens: int) -> tuple[Position, ...]:
    return tuple(sorted(Random(0).sample(range(num_tokens), num_tokens // 2)))


def check_us(world: World, mode: Mode) -> Callable[[], float]:
    """Measures ``ReclamationManager.check`` for each request; blocks count as scarce, so that it goes all the way."""
    config = VTokenConfig(policy="random", eviction_ratio=0.5, mode=mode, low_watermark=1.0)
    check = ReclamationManager(config).check
    tables, pool = world.tables * _SWEEPS, world.pool
    if not all(check(table, pool, 0) for table in tables):
        raise InvariantError(f"M-4: the check of mode {mode!r} finds nothing to do in half-dead requests")

    def work() -> None:
        for table in tables:
            check(table, pool, 0)

    return lambda: cpu_us(work) / len(tables)


def plan_us(world: World, planner: Planner) -> Callable[[], float]:
    """Measures ``Planner.plan`` for each move that it plans. Nothing is committed."""
    plan, pool = planner.plan, world.pool
    num_moves = 0
    for table in world.tables:
        found = plan(table, pool)
        if found is None:
            raise InvariantError(f"R-1: {type(planner).__name__} plans nothing for a half-dead request")
        check_plan(found, table)
        num_moves += len(found.moves)

    def work() -> None:
        for table in world.tables:
            plan(table, pool)

    return lambda: cpu_us(work) / num_moves


class Wear:
    """Measures calls that use their world up: evictions and appends. A worn world is replaced, outside the clock."""

    def __init__(self, num_requests: int, num_tokens: int) -> None:
        self._make = partial(World, num_requests, num_tokens)
        self._victims: list[Position] = []
        self._renew()

    def evict_us(self, batch: int) -> float:
        """One batch of tokens killed in each request: microseconds a token."""
        if len(self._victims) < batch:
            self._renew()
        victims, self._victims = sorted(self._victims[-batch:]), self._victims[:-batch]
        tables = self._world.tables
        if batch == 1:
            return cpu_us(lambda: _evict_each(tables, victims[0])) / len(tables)
        return cpu_us(lambda: _evict_batches(tables, victims)) / (len(tables) * batch)

    def append_us(self, batch: int) -> float:
        """One batch of tokens registered in each request: microseconds a token. The block lists are at hand."""
        if self._world.pool.num_free < len(self._world.tables) * cdiv(batch + 1, _BLOCK_SIZE):
            self._renew()
        tables = self._world.tables
        calls = [self._call(table, batch) for table in tables]
        return cpu_us(lambda: _append_batches(calls)) / (len(tables) * batch)

    def _call(self, table: RequestTable, count: int) -> tuple[RequestTable, list[BlockId], int]:
        """Arguments of ``sync_new_tokens`` for ``count`` more tokens."""
        new_blocks = self._world.pool.allocate(table.num_blocks_needed(count))
        return table, [*table.block_ids, *new_blocks], table.num_computed_tokens + count

    def _renew(self) -> None:
        self._world = self._make()
        for index, table in enumerate(self._world.tables):  # so that few cross into a new block in the same round
            _append_batches([self._call(table, index % table.block_size)])
        self._victims = self._world.tables[0].candidates()
        Random(1).shuffle(self._victims)


def _evict_each(tables: Sequence[RequestTable], victim: Position) -> None:
    for table in tables:
        table.evict_token(victim)


def _evict_batches(tables: Sequence[RequestTable], victims: Sequence[Position]) -> None:
    for table in tables:
        table.evict_tokens(victims)


def _append_batches(calls: Sequence[tuple[RequestTable, list[BlockId], int]]) -> None:
    for table, blocks, total in calls:
        table.sync_new_tokens(blocks, total)


def bytes_per_token(num_requests: int, num_tokens: int = _LENGTH, block_size: int = _BLOCK_SIZE) -> float:
    """Host memory of tables that grew by 256 tokens at a time, spare room of their arrays included, for each token.

    Block lists are made before: a block's number is kept by the pool, whoever holds it.
    """
    held = cdiv(num_tokens, block_size)
    lists = [list(range(index * held + 1, (index + 1) * held + 1)) for index in range(num_requests)]
    _half(num_tokens)
    tracemalloc.start()
    try:
        tables = [
            _grown_table(f"r{index}", block_size, blocks, num_tokens, step=256) for index, blocks in enumerate(lists)
        ]
        num_bytes, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    return num_bytes / (len(tables) * num_tokens)
