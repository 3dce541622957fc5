"""A small serving loop over the copy engine, on a fake device: begin, decode, recycle, share, evict, reclaim, end.

Tables, planners and pool are the real ones; KV is one number a slot, which says whose token it is. New requests are
prefilled on a third stream (as a KV transfer would be), which waits for nobody: a block that comes back too early is
written under the eyes of those who still use it.
"""

import random
from collections.abc import Sequence
from itertools import count

from torch import Tensor

from vtoken.block_pool import BlockPool
from vtoken.reclamation.evacuate import EvacuatePlanner
from vtoken.reclamation.fill import FillPlanner
from vtoken.reclamation.plan import ReclamationPlan
from vtoken.reclamation.recycle import recyclable
from vtoken.request_table import RequestTable
from vtoken.token_table import TokenTable
from vtoken.types import BlockId, ReqId, SlotId
from vtoken_torch.copy_engine.cuda import CUDACopyEngine
from vtoken_torch.copy_engine.device import Event
from vtoken_torch.copy_engine.fake_device import FakeDevice, FakeStream

__all__ = ["Rehearsal"]

_PROMPT_BLOCKS = 2


class Rehearsal:
    """Requests of a few blocks; ``step`` says in which order things are enqueued.

    Args:
        device: what all work is enqueued on.
        seed: of all that is random.
        engine: makes the engine of device and mover.
        own_stream: the engine's, and with it the regime: ``fenced``, or ``ordered`` with everything on one stream.
        num_plans: the engine's.

    Attributes:
        num_wrong_reads: live tokens that attention found overwritten or not yet there, in what has happened so far.
        num_recycled, num_shared, num_ended: that these did happen.
    """

    block_size = 4
    num_blocks = 24
    num_reqs = 3
    budget = 9
    """Live tokens above which a request loses some."""

    def __init__(
        self,
        device: FakeDevice,
        seed: int = 0,
        engine: type[CUDACopyEngine] = CUDACopyEngine,
        *,
        own_stream: bool = True,
        num_plans: int = 4,
    ) -> None:
        self.device, self.rng = device, random.Random(seed)
        self.engine = engine(device, self._move, own_stream=own_stream, num_plans=num_plans)
        self.is_fenced = own_stream
        self.aside = device.make_stream("prefill") if own_stream else device.compute
        self.pool, self.tables = BlockPool(self.num_blocks), TokenTable(self.block_size)
        self.kv = [-1] * (self.num_blocks * self.block_size)
        self.num_wrong_reads = self.num_recycled = self.num_shared = self.num_ended = 0
        self._next_number = count()
        self._next_request = count()
        self._numbers: dict[ReqId, list[int]] = {}  # by position

    def run(self, num_steps: int) -> "Rehearsal":
        """Steps; then all that is queued happens."""
        for _ in range(num_steps):
            self.step()
        self.device.finish()
        return self

    # -- the protocol ------------------------------------------------------------------------------------------------

    def step(self) -> None:
        """One step of the engine."""
        self.device.work("schedule", 0.5)
        self.reap()
        self.begin_request()
        self.decode()
        forward_done = self.engine.forward_done()
        self.device.enqueue(self.device.compute, "sample", duration=1.0)
        self.device.work("plan", 0.5)
        self.end_request()
        self.reclaim(forward_done)

    def reap(self) -> None:
        """Blocks whose copies and forwards are done come back."""
        self.pool.begin_pass()
        if self.is_fenced:
            self.pool.reap(self.engine.passed())

    def decode(self) -> None:
        """One token for each request. The copies come before the first KV write."""
        writes = self.take_slots()
        self.engine.wait()
        self.write("append", writes, self.device.compute, 0.5)
        self.attend()

    def reclaim(self, forward_done: Event) -> None:
        """All plans of the pass in one launch. What they give up keeps its holders until all are made."""
        plans = [plan for table in self.tables.values() if (plan := self.evict(table)) is not None]
        moves = [move for plan in plans for move in plan.moves]
        if moves:
            self.engine.launch([move.src_slot for move in moves], [move.dst_slot for move in moves], forward_done)
        self.give_up([block for plan in plans for block in plan.freed_block_ids])

    def give_up(self, block_ids: Sequence[BlockId]) -> None:
        """Behind a fence of all work so far."""
        if block_ids:
            self.pool.free(block_ids, self.engine.fence() if self.is_fenced else None)

    # -- requests ----------------------------------------------------------------------------------------------------

    def begin_request(self) -> None:
        """One where there is room: with the first block of another, or prefilled into blocks that just came back."""
        if len(self.tables) == self.num_reqs or self.pool.num_free < _PROMPT_BLOCKS:
            return
        parents = [table for table in self.tables.values() if self._may_share(table)]
        table = self.tables.add(f"request {next(self._next_request)}")
        numbers = self._numbers[table.req_id] = []
        if parents and self.rng.random() < 0.5:
            parent, self.num_shared = self.rng.choice(parents), self.num_shared + 1
            self.pool.share(parent.block_ids[:1])
            table.sync_new_tokens(parent.block_ids[:1], self.block_size)
            numbers += self._numbers[parent.req_id][: self.block_size]
            return
        length = _PROMPT_BLOCKS * self.block_size
        table.sync_new_tokens(self._take_blocks(_PROMPT_BLOCKS), length)
        writes = [(slot, self._new_number(table)) for slot in table.slots_of(range(length))]
        self.write("prefill", writes, self.aside, 2.0)
        prefilled = self.device.make_event()
        prefilled.record(self.aside)
        self.device.compute.wait_event(prefilled)

    def end_request(self) -> None:
        """Now and then one is done, aborted or preempted, whatever is under way."""
        if len(self.tables) == self.num_reqs and self.rng.random() < 0.2:
            table = self.tables.pop(self.rng.choice(list(self.tables)))
            del self._numbers[table.req_id]
            self.num_ended += 1
            self.give_up(table.block_ids)

    def take_slots(self) -> list[tuple[SlotId, int]]:
        """Slots and numbers of the step's tokens: over doomed tokens where that may be, else appended."""
        writes = []
        for table in self.tables.values():
            position = table.num_computed_tokens
            victim = recyclable(table, self.pool)
            if victim is not None:
                slot = table.recycle(victim, position)
                self.num_recycled += 1
            else:
                needed = table.num_blocks_needed(1)
                if needed > self.pool.num_free:
                    continue  # the scheduler waits for fences
                table.sync_new_tokens([*table.block_ids, *self._take_blocks(needed)], position + 1)
                slot = table.slot_at(table.table_slot_of(position))
            writes.append((slot, self._new_number(table)))
        return writes

    def evict(self, table: RequestTable) -> ReclamationPlan | None:
        """Kills some tokens, dooms some, and commits a plan for the rest."""
        excess = table.num_live_tokens - self.budget
        if excess <= 0 or table.num_doomed_tokens:
            return None
        chosen = self.rng.sample(table.candidates(), excess + 4)
        table.evict_tokens(chosen[2:])
        table.doom(chosen[:2])
        planner = self.rng.choice((FillPlanner(), EvacuatePlanner()))
        plan = planner.plan(table, self.pool)
        if plan is not None:
            table.apply_plan(plan)
            table.plan_done()  # whatever touches a slot from here on waits for the copies
            self.pool.take(plan.new_block_ids)
        return plan

    # -- work on the device ------------------------------------------------------------------------------------------

    def write(self, what: str, writes: Sequence[tuple[SlotId, int]], stream: FakeStream, duration: float) -> None:
        """Stores numbers in slots."""

        def run() -> None:
            for slot, number in writes:
                self.kv[slot] = number

        self.device.enqueue(stream, what, (), [slot for slot, _ in writes], run, duration)

    def attend(self) -> None:
        """Reads all live tokens of all requests."""
        seen = []
        for table in self.tables.values():
            numbers = self._numbers[table.req_id]
            seen += [(slot, numbers[p]) for slot, p in zip(table.live_slots(), table.live_positions(), strict=True)]

        def run() -> None:
            self.num_wrong_reads += sum(self.kv[slot] != number for slot, number in seen)

        self.device.enqueue(self.device.compute, "attention", {slot for slot, _ in seen}, (), run, 4.0)

    def _move(self, src: Tensor, dst: Tensor, num_moves: Tensor) -> None:
        taken = [self.kv[slot] for slot in src.tolist()]
        for slot, number in zip(dst.tolist(), taken, strict=True):
            self.kv[slot] = number

    def _new_number(self, table: RequestTable) -> int:
        number = next(self._next_number)
        self._numbers[table.req_id].append(number)
        return number

    def _take_blocks(self, num_blocks: int) -> list[BlockId]:
        """What came back last is taken first: the least time for whatever may still use it."""
        free = self.pool.free_block_ids()
        blocks = free[len(free) - num_blocks :]
        self.pool.take(blocks)
        return blocks

    def _may_share(self, table: RequestTable) -> bool:
        """Whether the first block holds the first tokens, all alive."""
        first = range(self.block_size)
        return table.num_computed_tokens >= self.block_size and all(
            table.is_live(position) and table.table_slot_of(position) == position for position in first
        )
