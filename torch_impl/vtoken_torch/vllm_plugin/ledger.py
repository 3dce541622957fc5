"""The scheduler's books in vLLM: the spec's token table over vLLM's blocks, and the record of one pass.

Shaped like the spec's executor as far as ``KVScheduler`` drives one. Nothing is copied here: moves go into the record.
"""

import copy
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from vtoken.errors import InvariantError
from vtoken.executor import Buffer
from vtoken.reclamation.fill import FillPlanner
from vtoken.reclamation.plan import ReclamationPlan, TableView
from vtoken.reclamation.recycle import recyclable
from vtoken.request_table import RequestTable
from vtoken.token_table import TokenTable
from vtoken.types import BlockId, Position, ReqId, SlotId
from vtoken_torch.vllm_plugin.kv_spec import EvictingManager
from vtoken_torch.vllm_plugin.pool import VllmPool
from vtoken_torch.vllm_plugin.record import StepRecord

__all__ = ["Ledger", "PoolShape"]


@dataclass(frozen=True, slots=True)
class PoolShape:
    """What ``KVScheduler`` reads of a pool's spec."""

    block_size: int
    num_blocks: int


class Ledger:
    """Token tables of the running requests, in step with ``EvictingManager``'s block lists."""

    def __init__(self, manager: EvictingManager) -> None:
        self.manager = manager
        self.pool = VllmPool(manager.block_pool)
        self.spec = PoolShape(manager.block_size, self.pool.num_blocks)
        self.tables = TokenTable(manager.block_size)
        self._moved: dict[ReqId, dict[Position, tuple[SlotId, SlotId]]] = {}
        self._record = StepRecord()
        self._reserved: dict[ReqId, int] = {}  # copy targets that kills of this pass count on

    # -- requests ----------------------------------------------------------------------------------------------------

    def admit(self, req_id: ReqId) -> None:
        """Registers an empty request; ``sync`` fills it once vLLM has given it blocks."""
        self.tables.add(req_id)

    def finish(self, req_id: ReqId) -> None:
        """Forgets a request, also in this pass's record; vLLM frees its blocks."""
        self.tables.pop(req_id)
        self._moved.pop(req_id, None)
        self._reserved.pop(req_id, None)
        for part in (self._record.block_ids, self._record.num_evicted, self._record.recycled):
            part.pop(req_id, None)

    preempt = finish

    def sync(self, req_id: ReqId, num_computed_tokens: int) -> None:
        """Registers what vLLM scheduled. New blocks stand at the end of its list."""
        table = self.tables[req_id]
        blocks = self.manager.req_to_blocks[req_id]
        new = [block.block_id for block in blocks[len(table.block_ids) :]]
        table.sync_new_tokens([*table.block_ids, *new] if new else table.block_ids, num_computed_tokens)

    # -- what KVScheduler drives -------------------------------------------------------------------------------------

    def table_view(self, req_id: ReqId) -> TableView:
        """What planners and policies read of a request."""
        return self.tables[req_id]

    def pool_view(self) -> VllmPool:
        """What planners read of the pool."""
        return self.pool

    def doom(self, req_id: ReqId, positions: Iterable[Position]) -> None:
        """Queues victims."""
        self.tables[req_id].doom(positions)

    def kill(self, req_id: ReqId, positions: Iterable[Position]) -> list[Position]:
        """Kills at once. A plan must close the holes in this very pass (``check_packed``)."""
        table = self.tables[req_id]
        killed = table.evict_tokens(positions)
        self._note_evicted(table)
        return killed

    def recycle(self, req_id: ReqId, kv: Buffer) -> None:
        """The next token goes over the next doomed one (SPEC C-1), if the pass gives the request exactly that token."""
        table = self.tables[req_id]
        victim = recyclable(table, self.pool)
        if victim is None:
            raise InvariantError(f"INV-7: request {req_id!r}: no doomed token in a private slot to recycle")
        slot = table.recycle(victim, table.num_computed_tokens)
        self.pool.forget_hashes((slot // table.block_size,))
        self._record.recycled[req_id] = slot
        self._note_evicted(table)

    def rollback_recycle(self, req_id: ReqId) -> None:
        """The pass gave the request no token: its victim lives on (SPEC C-2)."""
        table = self.tables[req_id]
        table.rollback_recycle()
        del self._record.recycled[req_id]
        self._note_evicted(table)

    def launch(self, plan: ReclamationPlan) -> None:
        """Commits a plan to table, pool and vLLM's block list; its moves join the record."""
        table, size = self.tables[plan.req_id], self.spec.block_size
        table.apply_plan(plan)
        table.plan_done()  # ordered: every later read or write of a slot comes later in the stream
        self.pool.take(plan.new_block_ids)
        written = {move.dst_slot // size for move in plan.moves}.difference(plan.new_block_ids)
        if table.cursor % size:
            written.add(table.block_ids[-1])  # the next token lands there
        self.pool.forget_hashes(written)
        self.manager.req_to_blocks[plan.req_id] = self.pool.blocks(table.block_ids)
        self._give_back(plan.req_id, plan.freed_block_ids)
        moved = self._moved.setdefault(plan.req_id, {})
        for position, src, dst in plan.moves:  # a second move in one pass starts where the bytes still are
            moved[position] = (moved[position][0] if position in moved else src, dst)
        self._record.block_ids[plan.req_id] = list(table.block_ids)
        self._reserved.pop(plan.req_id, None)

    def advance(self) -> None:
        """The pass is over, its record taken."""
        self.pool.begin_pass()
        self._reserved.clear()

    def reap(self) -> list[BlockId]:
        """No fences in regime ``ordered``."""
        return []

    def num_blocks_needed(self, req_id: ReqId, num_tokens: int) -> int:
        """Blocks that the request must be given for ``num_tokens`` more."""
        return self.tables[req_id].num_blocks_needed(num_tokens)

    # -- for the pass ------------------------------------------------------------------------------------------------

    def can_pack(self, req_id: ReqId, positions: Iterable[Position]) -> bool:
        """Whether these kills can be followed by a plan: copying survivors out of shared blocks takes free blocks.

        Reserves those blocks until the plan is made.
        """
        table = self.tables[req_id]
        if not self.pool.not_private(table.block_ids):
            return True
        trial = copy.deepcopy(table)
        trial.evict_tokens(positions)
        counter = _CountingPool(self.pool)
        FillPlanner().plan(trial, counter)
        others = sum(count for other, count in self._reserved.items() if other != req_id)
        if counter.num_wanted > self.pool.num_targets - others:
            return False
        self._reserved[req_id] = counter.num_wanted
        return True

    def check_packed(self) -> None:
        """INV-4 before vLLM allocates: its kernels read the first ``num_live_tokens`` slots of the block list."""
        for req_id, table in self.tables.items():
            if table.cursor != table.num_live_tokens:
                raise InvariantError(
                    f"INV-4: request {req_id!r}: expected a packed layout, got {table.num_live_tokens} live tokens "
                    f"before cursor {table.cursor}"
                )

    def take_record(self) -> StepRecord:
        """What this pass decided, for the workers."""
        record, self._record = self._record, StepRecord()
        for req_id, moved in self._moved.items():
            table = self.tables[req_id]
            pairs = [pair for position, pair in moved.items() if table.is_live(position) and pair[0] != pair[1]]
            record.src_slots.extend(src for src, _ in pairs)
            record.dst_slots.extend(dst for _, dst in pairs)
        self._moved.clear()
        return record

    # -- parts -------------------------------------------------------------------------------------------------------

    def _note_evicted(self, table: RequestTable) -> None:
        dead = table.num_computed_tokens - table.num_live_tokens
        self.manager.num_evicted[table.req_id] = self._record.num_evicted[table.req_id] = dead

    def _give_back(self, req_id: ReqId, block_ids: Sequence[BlockId]) -> None:
        self.pool.free(self.pool.blocks(block_ids))


class _CountingPool:
    """A pool that notes how many copy targets a planner asks for, and gives none."""

    def __init__(self, pool: VllmPool) -> None:
        self.num_wanted = 0
        self._pool = pool
        self.is_private = pool.is_private
        self.not_private = pool.not_private

    @property
    def num_blocks(self) -> int:
        return self._pool.num_blocks

    @property
    def num_free(self) -> int:
        return self._pool.num_free

    @property
    def num_in_flight(self) -> int:
        return self._pool.num_in_flight

    def copy_targets(self, count: int) -> list[BlockId] | None:
        self.num_wanted = count
        return None
