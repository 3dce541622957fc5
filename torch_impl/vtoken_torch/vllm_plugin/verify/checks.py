"""The scheduler's half of verification: tables, record and vLLM's pool against INV-2 to INV-8, each pass."""

import logging
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from vtoken.errors import SpecError
from vtoken.invariants import (
    Violation,
    check_accounting,
    check_counts,
    check_holders,
    check_launch,
    check_mapping,
    check_writes,
)
from vtoken.reclamation.plan import ReclamationPlan
from vtoken.request_table import RequestTable
from vtoken.types import NULL_BLOCK_ID, BlockId, ReqId, SlotId
from vtoken_torch.vllm_plugin.fences import copied_through
from vtoken_torch.vllm_plugin.parts import SchedulerPart
from vtoken_torch.vllm_plugin.record import ATTRIBUTE, StepRecord
from vtoken_torch.vllm_plugin.verify.books import VllmBooks
from vtoken_torch.vllm_plugin.verify.changes import FINDINGS, Changes, Finding, PassChanges
from vtoken_torch.vllm_plugin.verify.seen import Seen, changes_of, count_written, survivors_of
from vtoken_torch.vllm_plugin.verify.visibility import BusyBlocks
from vtoken_torch.vllm_plugin.verify.words import ToldWords

if TYPE_CHECKING:
    from vtoken_torch.vllm_plugin.scheduler import VTokenScheduler

__all__ = ["OnlineChecks"]

logger = logging.getLogger("vllm.vtoken")

_KEPT_FINDINGS = 256


class OnlineChecks(SchedulerPart):
    """Ends what breaks an invariant: the request, or all holders of a block, which is set aside.

    vLLM has scheduled the broken request's step already. That step is led to the null block, and its copies are taken
    out of the record, so that nobody else's KV is touched; the request ends when the result comes.

    Attributes:
        findings: the last ones, as they were logged; ``num_findings`` counts all.
        books: vLLM's, with the blocks that are set aside.
    """

    def __init__(self, scheduler: "VTokenScheduler") -> None:
        self.findings: deque[Finding] = deque(maxlen=_KEPT_FINDINGS)
        self.num_findings = 0
        self.books = VllmBooks(scheduler)
        self._scheduler = scheduler
        self._ledger = scheduler.vtoken.ledger
        self._block_size = self._ledger.spec.block_size
        self._busy = BusyBlocks(self._block_size)  # fills up in regime ``fenced`` alone
        self._told = ToldWords()
        self._seen: dict[ReqId, Seen] = {}
        self._gone: list[ReqId] = []
        self._broken: dict[ReqId, str] = {}  # and why
        self._step = 0
        scheduler.vtoken.on_broken = self._break_in_plan

    # -- the sides' calls --------------------------------------------------------------------------------------------

    def pass_opened(self) -> None:
        """Ends requests whose own plans broke, before vLLM gives them a step."""
        self._end_broken()

    def pass_closed(self, output: Any, record: StepRecord) -> None:
        """Checks the pass, and tells the workers what became of each token."""
        self._step = record.number
        before, self._seen = self._seen, {}
        changes: dict[ReqId, Changes] = {}
        recycled = self._ledger.recycled(output.num_scheduled_tokens)
        for req_id in filter(self._scheduler.vtoken.is_running, self._scheduler.requests):
            if req_id not in self._broken:
                with self._guard(req_id):
                    table = self._ledger.table(req_id)
                    self._check_table(table, record)
                    seen = self._seen[req_id] = Seen.of(table)
                    changes[req_id] = changes_of(req_id, before.get(req_id), seen, count_written(output, req_id))
                    self._check_recycled(req_id, changes[req_id], recycled.get(req_id))
        self._check_moves(record, before, changes)
        self._check_written(record, changes)
        if self._ledger.pool.is_fenced:
            self._busy.add(record, {req_id: seen.block_ids for req_id, seen in before.items()}, self.books.now())
        self._check_pool()
        sound = {req_id: made for req_id, made in changes.items() if req_id not in self._broken}
        record.verify = PassChanges(sound, self._gone, recycled.keys() & sound.keys())
        self._gone = []
        if self._broken:
            self._isolate(output, record, sound)

    def result_came(self, output: Any, result: Any) -> None:
        """Takes in what the workers found; then broken requests end, before vLLM reads their tokens."""
        self._step = getattr(output, ATTRIBUTE).number
        if self._ledger.pool.is_fenced:
            self._busy.done(copied_through(output, result))
        findings = [each for each in getattr(result, FINDINGS, ()) if each.req_id in self._scheduler.requests]
        for finding in findings:
            self._report(finding, [finding.req_id])
        if any(finding.number == 1 for finding in findings):
            self.books.distrust_idle_cache()
        self._end_broken()

    def request_left(self, req_id: ReqId, is_finished: bool) -> None:
        """Nothing more is checked of it."""
        self._seen.pop(req_id, None)
        self._told.forget(req_id)
        self._gone.append(req_id)
        if is_finished:
            self._broken.pop(req_id, None)

    # -- one request -------------------------------------------------------------------------------------------------

    def _check_table(self, table: RequestTable, record: StepRecord) -> None:
        req_id, manager = table.req_id, self._ledger.manager
        check_counts(table)
        dead, left_out = table.num_evicted_tokens, table.num_computed_tokens - table.cursor
        for what, expected, count in (
            ("dead tokens in the block manager", dead, self._ledger.num_dead(req_id)),
            ("dead tokens that lengths leave out", left_out, self._ledger.num_left_out(req_id)),
            ("dead tokens in the record", left_out, _num_left_out_told(table, record)),
        ):
            if count != expected:
                raise Violation(8, req_id, what, expected, count)
        check_mapping(table)
        block_ids = [block.block_id for block in manager.req_to_blocks[req_id]]
        if block_ids != table.block_ids:
            raise Violation(2, req_id, "vLLM's block list", table.block_ids, block_ids)
        told = record.block_ids.get(req_id, block_ids)
        if told != block_ids[: len(told)]:
            raise Violation(2, req_id, "block list in the record", block_ids, told)
        self._ledger.check_layout(table)
        self._told.check(table, record)

    @staticmethod
    def _check_recycled(req_id: ReqId, made: Changes, slot: SlotId | None) -> None:
        if slot is not None and [slot] != made.new_slots:
            raise Violation(2, req_id, f"slot of the recycled position {made.first_new}", made.new_slots, slot, (slot,))

    # -- copies and writes -------------------------------------------------------------------------------------------

    def _check_moves(self, record: StepRecord, before: Mapping[ReqId, Seen], changes: Mapping[ReqId, Changes]) -> None:
        """The record's copies are exactly what the tables say (INV-1, INV-5), and may run in any order (INV-5)."""
        pairs = set(zip(record.src_slots, record.dst_slots, strict=True))
        if not pairs and not any(made.moves for made in changes.values()):
            return
        survivors, freed = survivors_of(before, changes, self._block_size), self._freed(before)
        plans = []
        for req_id, made in changes.items():
            plans.append(ReclamationPlan(req_id, 0, 0, 0, tuple(made.moves), ()))
            with self._guard(req_id):
                for position, *pair in made.moves:
                    if tuple(pair) not in pairs:
                        raise Violation(1, req_id, f"copy of position {position} in the record", pair, "none", pair)
                check_launch(plans[-1:], survivors, freed)
        with self._guard(None):
            check_launch([plan for plan in plans if plan.req_id not in self._broken], survivors, freed)
        claimed = {(src, dst) for made in changes.values() for _, src, dst in made.moves}
        for src, dst in sorted(pairs - claimed):
            block_id = src // self._block_size
            owners = self.books.holders_of(block_id)
            gave_up = [req_id for req_id, seen in before.items() if block_id in seen.block_ids]
            if not any(owner in self._broken for owner in (*owners, *gave_up)):
                violation = Violation(
                    5, None, f"copy from slot {src} to {dst}", "a move of a table", "none", (src, dst)
                )
                self._report(Finding.of(violation), owners)

    def _freed(self, before: Mapping[ReqId, Seen]) -> set[BlockId]:
        """Blocks that some request gave up in this pass, and that had no other holder."""
        num_holders = Counter(block for seen in before.values() for block in seen.block_ids)
        given_up = (seen.block_ids - self._seen[r].block_ids for r, seen in before.items() if r in self._seen)
        return {block for blocks in given_up for block in blocks if num_holders[block] == 1}

    def _check_written(self, record: StepRecord, changes: Mapping[ReqId, Changes]) -> None:
        """INV-7. What vLLM writes into blocks of requests without dead tokens is its own; their tail is looked at."""
        now, size = self.books.now(), self._block_size
        for req_id, made in changes.items():
            table = self._ledger.table(req_id)
            written = [dst for _, _, dst in made.moves]
            if table.num_evicted_tokens:
                written += made.new_slots[made.num_cached :]
            elif table.cursor % size:
                written.append(table.slot_at(table.cursor))
            with self._guard(req_id):
                check_writes(req_id, written, now, size)

    def _check_pool(self) -> None:
        """INV-2 between requests, INV-3 and INV-6. Each turn takes one block out of circulation, so that this ends."""
        while True:
            now = self.books.now()
            try:
                self._busy.check(now)
                check_holders(now.holders, now)
                check_accounting(now.holders, now)
            except Violation as violation:
                if not self._fail_holders(violation):
                    return
            else:
                return

    # -- what follows ------------------------------------------------------------------------------------------------

    @contextmanager
    def _guard(self, req_id: ReqId | None) -> Iterator[None]:
        """A violation inside fails its request; one of INV-7 all holders of its block."""
        try:
            yield
        except Violation as violation:
            if violation.number == 7:
                self._fail_holders(violation)
            else:
                self._report(Finding.of(violation), [violation.req_id or req_id])
        except SpecError as error:  # a table that contradicts itself
            self._report(Finding(2, req_id, "table", "one that can be read", str(error)), [req_id])

    def _fail_holders(self, violation: Violation) -> bool:
        """Sets the block aside; False if it is none that could be."""
        block_id = violation.block_id
        holders = [] if block_id is None else self.books.holders_of(block_id)
        self._report(Finding.of(violation), [violation.req_id, *holders])
        return block_id is not None and self.books.set_aside(block_id)

    def _break_in_plan(self, req_id: ReqId, error: Exception) -> None:
        """A plan, or the layout that it left, was refused: by table, pool or ledger, which says what for."""
        self._step = self._ledger.pool.pass_number
        if isinstance(error, Violation):
            finding = Finding.of(error)
        else:
            finding = Finding(4, req_id, "plan", "one that fits the table and packs it", str(error))
        self._report(finding, [req_id])

    def _end_broken(self) -> None:
        if self._broken:
            broken, self._broken = self._broken, {}
            self.books.distrust(broken)
            self._scheduler.fail(broken)

    def _report(self, finding: Finding, req_ids: Iterable[ReqId | None]) -> None:
        self.findings.append(finding)
        self.num_findings += 1
        failing = [req_id for req_id in dict.fromkeys(req_ids) if req_id is not None]
        logger.error("vToken: step %d, requests %s, slots %s: %s", self._step, failing, list(finding.slots), finding)
        for req_id in failing:
            self._broken.setdefault(req_id, str(finding))

    def _isolate(self, output: Any, record: StepRecord, sound: Mapping[ReqId, Changes]) -> None:
        """Takes broken requests out of the record, and leads their step to the null block."""
        claimed = {(src, dst) for made in sound.values() for _, src, dst in made.moves}
        pairs = [pair for pair in zip(record.src_slots, record.dst_slots, strict=True) if pair in claimed]
        record.src_slots, record.dst_slots = [src for src, _ in pairs], [dst for _, dst in pairs]
        cached = output.scheduled_cached_reqs
        for req_id, new_ids in zip(cached.req_ids, cached.new_block_ids, strict=True):
            if req_id not in self._broken or req_id in cached.resumed_req_ids:
                continue  # what starts in this step has nothing but blocks that vLLM gave it
            num_new = len(new_ids[0]) if new_ids else 0
            num_known = len(self._ledger.manager.req_to_blocks[req_id]) - num_new
            record.block_ids[req_id] = [NULL_BLOCK_ID] * num_known
            record.recycles.pop(req_id, None)
            record.live_words.pop(req_id, None)  # its lengths leave out all of them
            num_scheduled = output.num_scheduled_tokens[req_id]
            record.num_evicted[req_id] = self._scheduler.requests[req_id].num_computed_tokens - num_scheduled


def _num_left_out_told(table: RequestTable, record: StepRecord) -> int:
    """How many tokens the workers are told to leave out; where they are told nothing, what they know."""
    recycles = record.recycles.get(table.req_id)
    if recycles is not None:
        return recycles.num_dead + table.num_computed_tokens - recycles.first
    return record.num_evicted.get(table.req_id, table.num_computed_tokens - table.cursor)
