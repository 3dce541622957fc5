"""INV-3 online: no slot is read or overwritten before the copies that it depends on are done.

Two halves. On a worker one stream gives the order, as long as records are carried out one after another and each one's
copies come first in its step. Where copies have a stream of their own, the scheduler must keep their blocks back too.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from dataclasses import dataclass
from typing import Any

from vtoken.invariants import Violation
from vtoken.types import BlockId, ReqId
from vtoken_torch.vllm_plugin.record import StepRecord
from vtoken_torch.vllm_plugin.verify.books import PoolNow
from vtoken_torch.vllm_plugin.verify.changes import Finding, PassChanges

__all__ = ["BusyBlocks", "StepOrder"]


class StepOrder:
    """The worker's half: each record once and in turn, its copies between ``begins`` and ``copied``, none elsewhere.

    A forward must be enqueued before the next record begins. What was copied where is the fingerprints' business.
    """

    def __init__(self, num_moved: Callable[[], int]) -> None:
        """``num_moved``: tokens copied so far."""
        self._num_moved = num_moved
        self._number: int | None = None  # of the last record
        self._moved_before = 0
        self._moving: list[ReqId] = []
        self._open_forward: list[ReqId] = []

    def begins(self, record: StepRecord) -> Iterator[Finding]:
        """A step begins."""
        changes = record.verify or PassChanges()
        if self._number is not None and record.number != self._number + 1:
            yield from _findings(changes.requests, "number of the record", self._number + 1, record.number)
        if self._open_forward:
            what = f"forward of step {self._number} when the next one begins"
            yield from _findings(self._open_forward, what, "enqueued", "not yet")
        moved = self._num_moved()
        if moved != self._moved_before:
            what = f"tokens copied after step {self._number} began its forward"
            yield from _findings(self._moving, what, 0, moved - self._moved_before)
        self._number, self._moved_before, self._open_forward = record.number, moved, []
        self._moving = [req_id for req_id, made in changes.requests.items() if made.moves]

    def copied(self, record: StepRecord) -> Iterator[Finding]:
        """From here on the step may write."""
        moved = self._num_moved()
        if record.src_slots and moved == self._moved_before:
            what = f"copies of step {record.number} before its first write"
            yield from _findings(self._moving, what, len(record.src_slots), "none")
        self._moved_before = moved

    def forward(self, req_ids: Iterable[ReqId]) -> None:
        """The forward of these requests is about to be enqueued; with none of them, it is."""
        self._open_forward = list(req_ids)


@dataclass(frozen=True, slots=True)
class _Busy:
    number: int  # of the last pass whose copies use the block
    may_hold: Set[ReqId]
    block_hash: object  # who finds the block by it reads alone


class BusyBlocks:
    """The scheduler's half: a block that copies read or write stays with those who held it until they are done."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._busy: dict[BlockId, _Busy] = {}

    def add(self, record: StepRecord, before: Mapping[ReqId, Set[BlockId]], now: PoolNow) -> None:
        """A pass is closed. ``before``: the blocks of each request when it was opened."""
        used = {slot // self._block_size for slot in (*record.src_slots, *record.dst_slots)}
        if not used:
            return
        holders = _by_block(now)
        for req_id, blocks in before.items():
            for block in blocks & used:
                holders[block].add(req_id)
        for block in used:
            known = self._busy.get(block)
            may_hold = holders[block] | (known.may_hold if known else frozenset())
            self._busy[block] = _Busy(record.number, may_hold, now.block_hash(block))

    def done(self, number: int) -> None:
        """Workers report the copies of all passes up to ``number`` done."""
        self._busy = {block: busy for block, busy in self._busy.items() if busy.number > number}

    def check(self, now: PoolNow) -> None:
        """None of them is free or has a new holder, unless one that found it in the prefix cache."""
        if not self._busy:
            return
        free, holders = set(now.free_block_ids()), _by_block(now)
        for block, busy in self._busy.items():
            if now.is_aside(block):
                continue
            strangers = holders[block] - busy.may_hold
            if block in free:
                found = "free"
            elif strangers and (busy.block_hash is None or now.block_hash(block) != busy.block_hash):
                found = f"given to {sorted(strangers)}"
            else:
                continue
            where = f"block {block}, which copies of pass {busy.number} use"
            raise Violation(3, None, where, "kept until they are done", found, block_id=block)


def _by_block(now: PoolNow) -> defaultdict[BlockId, set[ReqId]]:
    found: defaultdict[BlockId, set[ReqId]] = defaultdict(set)
    for req_id, holder in now.holders.items():
        for block in holder.block_ids:
            found[block].add(req_id)
    return found


def _findings(req_ids: Iterable[ReqId], what: str, expected: Any, found: Any) -> Iterator[Finding]:
    """The same of each request."""
    for req_id in req_ids:
        yield Finding(3, req_id, what, str(expected), str(found))
