"""Whether a request may start: four counters, four answers (SPEC M-1, M-2)."""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from math import ceil

from vtoken.config import VTokenConfig
from vtoken.reclamation.plan import PoolView, TableView
from vtoken.types import cdiv

__all__ = ["Admission", "Answer", "PoolCounters", "admission", "count_pool", "reclaimable_blocks"]


class Answer(Enum):
    """What to do with the head of the queue."""

    ADMIT = "admit"
    WAIT_FOR_RECLAMATION = "wait for reclamation"
    QUEUE = "queue"
    NEVER_FITS = "never fits"


@dataclass(frozen=True, slots=True)
class PoolCounters:
    """Where the blocks are, in blocks. ``reclaimable`` ones are held now and come back as soon as plans run."""

    total: int
    free: int
    reclaimable: int
    in_flight: int
    headroom: int


@dataclass(frozen=True, slots=True)
class Admission:
    """The answer, with the numbers that led to it."""

    answer: Answer
    reason: str


def reclaimable_blocks(table: TableView, pool: PoolView) -> int:
    """Private blocks held beyond those that the private live tokens need. O(blocks)."""
    held = live = 0
    for block, word in zip(table.block_ids, table.live_words, strict=True):
        if pool.is_private(block):
            held += 1
            live += word.bit_count()
    return held - cdiv(live, table.block_size)


def count_pool(tables: Iterable[TableView], pool: PoolView, config: VTokenConfig) -> PoolCounters:
    """The four counters. Headroom is kept back for evacuation targets, so only lazy mode has any."""
    total = pool.num_blocks - 1
    needs_headroom = config.variant == "vtoken" and config.mode == "lazy"
    reclaims = config.variant == "vtoken"
    return PoolCounters(
        total=total,
        free=pool.num_free,
        reclaimable=sum(reclaimable_blocks(table, pool) for table in tables) if reclaims else 0,
        in_flight=pool.num_in_flight,
        headroom=ceil(config.headroom * total) if needs_headroom else 0,
    )


def admission(counters: PoolCounters, needed_blocks: int, worst_case_blocks: int) -> Admission:
    """Answers for a request that needs ``needed_blocks`` now, and ``worst_case_blocks`` (live plus a chunk) at most."""
    usable = counters.total - counters.headroom
    if worst_case_blocks > usable:
        return Admission(
            Answer.NEVER_FITS,
            f"the request needs {worst_case_blocks} blocks at its worst, the pool has {usable}: "
            "lower its budget or its length, or give the pool more blocks",
        )
    available = counters.free - counters.headroom
    if needed_blocks <= available:
        return Admission(Answer.ADMIT, f"{needed_blocks} blocks are needed, {available} are free")
    soon = available + counters.reclaimable + counters.in_flight
    if needed_blocks <= soon:
        return Admission(Answer.WAIT_FOR_RECLAMATION, f"{needed_blocks} blocks are needed, {soon} are free soon")
    return Admission(Answer.QUEUE, f"{needed_blocks} blocks are needed, {soon} are free even after reclamation")
