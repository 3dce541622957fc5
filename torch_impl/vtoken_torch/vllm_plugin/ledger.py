"""The scheduler's books in vLLM: the spec's token table over vLLM's blocks, and the record of one pass.

Shaped like the spec's executor as far as an ``Evictor`` drives one. Nothing is copied here: moves go into the record.

A table is brought up to date when somebody looks at it, not in every step: what vLLM appended or recycled follows from
its own count.
"""

from array import array
from collections import deque
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice, takewhile

from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.request import Request

from vtoken.errors import InvariantError
from vtoken.invariants import check_packed
from vtoken.reclamation.plan import ReclamationPlan, TableView
from vtoken.request_table import RequestTable
from vtoken.token_table import TokenTable
from vtoken.types import BlockId, Position, ReqId, SlotId, cdiv
from vtoken_torch.vllm_plugin.kv_spec import EvictingManager
from vtoken_torch.vllm_plugin.pool import VllmPool
from vtoken_torch.vllm_plugin.record import Recycles, StepRecord
from vtoken_torch.vllm_plugin.recycling import Death, Recycling, num_in_turn
from vtoken_torch.vllm_plugin.sharing import Sharing

__all__ = ["Ledger", "PoolShape"]


@dataclass(frozen=True, slots=True)
class PoolShape:
    """What an ``Evictor`` reads of a pool's spec."""

    block_size: int
    num_blocks: int


class Ledger:
    """Token tables of the running requests, in step with ``EvictingManager``'s block lists."""

    def __init__(
        self, manager: EvictingManager, requests: Mapping[ReqId, Request], count: Callable[[ReqId], int]
    ) -> None:
        """``requests``: vLLM's, those that have a table among them.

        ``count``: tokens of a running request that have their places, those of the pass that is closed included.
        """
        self.manager = manager
        self._requests = requests
        self.pool = VllmPool(manager.block_pool)
        self.spec = PoolShape(manager.block_size, self.pool.num_blocks)
        self.count = count
        self._tables = TokenTable(manager.block_size)
        self.recycling: dict[ReqId, Recycling] = {}
        manager.recycling = self.recycling
        self._moved: dict[ReqId, dict[Position, tuple[SlotId, SlotId]]] = {}
        self._record = StepRecord()
        self.sharing = Sharing(self.pool)
        self._planned: dict[ReqId, int] = {}  # regime ``fenced``: the last pass that had a plan of the request
        self.num_copied_passes = 0  # the last pass whose copies, and those before, are done

    # -- requests ----------------------------------------------------------------------------------------------------

    def admit(self, req_id: ReqId) -> None:
        """Registers an empty request; ``sync`` fills it once vLLM has given it blocks."""
        self._tables.add(req_id)

    def finish(self, req_id: ReqId) -> None:
        """Forgets a request, also in this pass's record; vLLM frees its blocks."""
        self._tables.pop(req_id)
        self.recycling.pop(req_id, None)
        self._moved.pop(req_id, None)
        self.sharing.reserved.pop(req_id, None)
        record = self._record
        for part in (record.block_ids, record.num_evicted, record.recycles, record.live_words):
            part.pop(req_id, None)

    preempt = finish

    @property
    def tables(self) -> TokenTable:
        """All tables, brought up to date. O(requests): ``table`` is for one."""
        for req_id in self._tables:
            self.table(req_id)
        return self._tables

    def table(self, req_id: ReqId) -> RequestTable:
        """A request's table, brought up to date."""
        table = self._tables[req_id]
        num_new = self.count(req_id) - table.num_computed_tokens
        if num_new > 0:
            if req_id in self.recycling:
                table.recycle_next(num_new)
            else:
                self.sync(req_id, table.num_computed_tokens + num_new)
        return table

    def sync(self, req_id: ReqId, num_computed_tokens: int) -> None:
        """Registers what vLLM appended. New blocks stand at the end of its list."""
        table = self._tables[req_id]
        blocks = self.manager.req_to_blocks[req_id]
        new = [block.block_id for block in blocks[len(table.block_ids) :]]
        table.sync_new_tokens([*table.block_ids, *new] if new else table.block_ids, num_computed_tokens)

    def packed_positions(self, req_id: ReqId) -> "array[int]":
        """Which position lies at each packed index of what vLLM's kernels read, this step's tokens included."""
        return self.table(req_id).packed_positions()

    def columns(self, req_id: ReqId) -> Sequence[int] | None:
        """Where these stand in a row of attention mass; None: one after the other."""
        return None

    def num_used_slots(self, num_live: int, num_listed_again: int) -> int:
        """Slots that hold a token which is live for some holder.

        The layout is packed, so a block that stands in several lists is full of live tokens: each listing beyond the
        first (``num_listed_again`` in all) takes its ``block_size`` live tokens off the sum over requests.
        """
        return num_live - num_listed_again * self.spec.block_size

    # -- what an Evictor drives --------------------------------------------------------------------------------------

    def table_view(self, req_id: ReqId) -> TableView:
        """What planners and policies read of a request."""
        return self.table(req_id)

    def pool_view(self) -> VllmPool:
        """What planners read of the pool."""
        return self.pool

    def doom(self, req_id: ReqId, positions: Iterable[Position]) -> None:
        """Queues victims."""
        self._changed(req_id).doom(positions)

    def kill(self, req_id: ReqId, positions: Iterable[Position]) -> list[Position]:
        """Kills at once. A plan must close the holes in this very pass (``check_packed``)."""
        table = self._changed(req_id)
        killed = table.evict_tokens(positions)
        self._note_evicted(table)
        return killed

    def recycle_from_here(self, req_id: ReqId, deaths: deque[Death]) -> int:
        """The next tokens of a request go over doomed ones, for as long as one dies at each count (SPEC C-1).

        Returns the count at which that is over. In between the request costs nothing in any pass: each step that
        vLLM gives it is a recycle, and a pass that gives it no token changes nothing, since all follows from its count.

        Args:
            req_id: a request with one token to write, and a packed layout.
            deaths: its deaths to come. They stay in it until ``settle`` takes those off that have happened.
        """
        table = self._changed(req_id)
        first, size = table.num_computed_tokens, table.block_size
        slots = table.slots_of([victim for _, victim in islice(deaths, num_in_turn(deaths, first))])
        self.pool.forget_hashes((slots[0] // size,))  # nobody can come to share the others either
        guarded = self.pool.guarded({slot // size for slot in slots})
        if guarded:
            slots = list(takewhile(lambda slot: slot // size not in guarded, slots))
        dead = first - table.num_live_tokens
        self.recycling[req_id] = Recycling(self._requests[req_id], first, dead, slots, deaths)
        self._record.recycles[req_id] = Recycles(first, dead, array("q", slots))
        return self.recycling[req_id].end

    def end_recycling(self, req_id: ReqId) -> None:
        """What comes next for the request is decided anew; what has happened is settled."""
        self.table(req_id)
        self.settle(req_id)
        del self.recycling[req_id]
        self._record.recycles.pop(req_id, None)
        self._note_evicted(self._tables[req_id])

    def settle(self, req_id: ReqId) -> None:
        """Takes the deaths that recycles brought off the request's ``deaths``."""
        recycling = self.recycling.get(req_id)
        if recycling is not None:
            for _ in range(recycling.num_done - recycling.num_settled):
                recycling.deaths.popleft()
            recycling.num_settled = recycling.num_done

    def num_dead(self, req_id: ReqId) -> int:
        """Dead tokens of a request."""
        recycling = self.recycling.get(req_id)
        return self.manager.num_dead.get(req_id, 0) if recycling is None else recycling.num_dead_now

    def recycled(self, num_scheduled: Container[ReqId]) -> dict[ReqId, SlotId]:
        """Slots that the tokens of the pass that is closed take from dead ones. O(requests): for those who watch."""
        return {req_id: each.last_slot for req_id, each in self.recycling.items() if req_id in num_scheduled}

    def launch(self, plan: ReclamationPlan) -> None:
        """Commits a plan to table, pool and vLLM's block list; its moves join the record."""
        table, size = self._changed(plan.req_id), self.spec.block_size
        table.apply_plan(plan)
        table.plan_done()  # every later read or write of a slot comes later in the stream, which waits for the copies
        self.pool.take(plan.new_block_ids)
        written = {move.dst_slot // size for move in plan.moves}.difference(plan.new_block_ids)
        if table.cursor % size:
            written.add(table.block_ids[-1])  # the next token lands there
        self.pool.forget_hashes(written)
        self.manager.req_to_blocks[plan.req_id] = self.pool.blocks(table.block_ids)
        self._give_back(plan.req_id, plan.freed_block_ids)
        self.pool.copied_out_of({move.src_slot // size for move in plan.moves}.intersection(plan.freed_block_ids))
        if self.pool.is_fenced:
            self._planned[plan.req_id] = self.pool.pass_number
        moved = self._moved.setdefault(plan.req_id, {})
        for position, src, dst in plan.moves:  # a second move in one pass starts where the bytes still are
            moved[position] = (moved[position][0] if position in moved else src, dst)
        self._record.block_ids[plan.req_id] = list(table.block_ids)
        self.sharing.reserved.pop(plan.req_id, None)

    def advance(self) -> None:
        """The pass is over, its record taken."""
        self.pool.begin_pass()
        self.sharing.begin_pass()

    def reap(self) -> list[BlockId]:
        """Fences pass in ``copies_done``."""
        return []

    def num_blocks_needed(self, req_id: ReqId, num_tokens: int) -> int:
        """Blocks that the request must be given for ``num_tokens`` more."""
        num_live = self.count(req_id) - self.num_dead(req_id)
        return max(0, cdiv(num_live + num_tokens, self.spec.block_size) - len(self.manager.req_to_blocks[req_id]))

    # -- regime ``fenced`` -------------------------------------------------------------------------------------------

    def fence_frees(self) -> None:
        """Blocks that plans give up come back when ``copies_done`` says so, not before."""
        self.pool.is_fenced = True
        self.manager.hold_back = self._hold_back

    def copies_done(self, number: int) -> None:
        """The copies of all passes up to ``number`` are done, and the forwards before them."""
        self.num_copied_passes = number
        self.pool.reap(number)

    def _hold_back(self, req_id: ReqId, blocks: Sequence[KVCacheBlock]) -> bool:
        """A request leaves: its blocks wait if copies of its own may still read or write them."""
        number = self._planned.pop(req_id, 0)
        if number > self.num_copied_passes:
            self.pool.fence(blocks, number)
        return number > self.num_copied_passes

    # -- for the pass ------------------------------------------------------------------------------------------------

    def killable(self, req_id: ReqId, victims: Sequence[Position], may_copy: bool) -> Sequence[Position]:
        """Those of these victims whose deaths a plan can follow in this pass (``Sharing.killable``)."""
        return self.sharing.killable(self.table(req_id), victims, may_copy)

    def check_layout(self, table: RequestTable) -> None:
        """INV-4 at rest, for verification."""
        check_packed(table)

    def num_left_out(self, req_id: ReqId) -> int:
        """Dead tokens that the workers' lengths and slots leave out: all of them."""
        return self.num_dead(req_id)

    def check_packed(self, req_id: ReqId) -> None:
        """INV-4 before vLLM allocates: its kernels read the first ``num_live_tokens`` slots of the block list."""
        table = self._tables[req_id]
        if table.cursor != table.num_live_tokens:
            raise InvariantError(
                f"INV-4: request {req_id!r}: expected a packed layout, got {table.num_live_tokens} live tokens "
                f"before cursor {table.cursor}"
            )

    def take_record(self) -> StepRecord:
        """What this pass decided, for the workers."""
        record, self._record = self._record, StepRecord()
        record.number = self.pool.pass_number
        for req_id, moved in self._moved.items():
            table = self.table(req_id)
            pairs = [pair for position, pair in moved.items() if table.is_live(position) and pair[0] != pair[1]]
            record.src_slots.extend(src for src, _ in pairs)
            record.dst_slots.extend(dst for _, dst in pairs)
        self._moved.clear()
        return record

    # -- parts -------------------------------------------------------------------------------------------------------

    def _changed(self, req_id: ReqId) -> RequestTable:
        """A table that is about to change in another way than by recycles."""
        if req_id in self.recycling:
            self.end_recycling(req_id)
        return self.table(req_id)

    def _note_evicted(self, table: RequestTable) -> None:
        dead = table.num_computed_tokens - table.num_live_tokens
        self.manager.num_evicted[table.req_id] = self._record.num_evicted[table.req_id] = dead

    def _give_back(self, req_id: ReqId, block_ids: Sequence[BlockId]) -> None:
        self.pool.free(self.pool.blocks(block_ids))
