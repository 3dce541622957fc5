"""An executor in two halves: host bookkeeping (this file, the spec's own table and pool) over a store of arrays.

``KVStore`` is all that a framework must write: nine small array operations. ``PagedExecutor`` turns the executor
protocol into them. The store's arrays are the only thing that ``observe`` reads, so that a store which writes to the
wrong slot, or keeps a stale mask, is seen.
"""

from collections.abc import Iterable, Sequence
from typing import ClassVar, Protocol

from vtoken.block_pool import BlockPool
from vtoken.errors import SpecError
from vtoken.executor import Attention, Buffer, KVSpec, Observation, RequestObservation, Ticket
from vtoken.reclamation.plan import ReclamationPlan
from vtoken.reclamation.recycle import recyclable
from vtoken.request_table import RequestTable
from vtoken.token_table import TokenTable
from vtoken.types import BlockId, Move, Position, ReqId, SlotId

__all__ = ["KVStore", "PagedExecutor"]


class KVStore(Protocol):
    """Arrays of one pool. Rows are request rows, 0 to ``max_num_reqs - 1``; the host never reads what it wrote.

    State that a store keeps: KV rows (raw bits) and one position for each slot; for each row its block ids and live
    words in table order; one free flag for each block.
    """

    def write(self, slots: Sequence[SlotId], positions: Sequence[Position], kv: Buffer) -> None:
        """Stores tokens: KV bytes ``[len(slots), token_bytes]`` and positions. Slots are distinct."""
        ...

    def move(self, moves: Sequence[Move]) -> None:
        """Copies KV bits and positions from source to destination slots, all layers (INV-5 holds: any order)."""
        ...

    def set_row(self, row: int, block_ids: Sequence[BlockId], live_words: Sequence[int]) -> None:
        """Rewrites one request's row: its block ids and live words; what was there before is gone."""
        ...

    def set_words(self, row: int, indices: Sequence[int], live_words: Sequence[int]) -> None:
        """Updates live words at some block indices of a row."""
        ...

    def set_free(self, block_ids: Sequence[BlockId], free: bool) -> None:
        """Flags blocks as free or not."""
        ...

    def attend(self, row: int, q: Buffer, query_positions: Sequence[Position]) -> Attention:
        """Masked attention over the row's live slots; a query sees the tokens at its position or before.

        ``q``: float32 ``[num_queries, num_layers, num_query_heads, head_size]``; scale ``head_size ** -0.5``. Dead
        slots never leak, NaN included; a query that sees nothing gives zeros.
        """
        ...

    def read_row(self, row: int) -> RequestObservation:
        """Reads a request back from the arrays; the fingerprint is computed where they live."""
        ...

    def fingerprint_row(self, row: int) -> str:
        """The fingerprint alone: what ``read_row`` reports, without bringing the bytes to the host."""
        ...

    def read_free(self) -> frozenset[BlockId]:
        """Blocks flagged free."""
        ...


class PagedExecutor:
    """The executor protocol over the spec's token table, its block pool, and a ``KVStore``.

    Subclasses set ``name`` and implement ``_make_store``. Copies run before the same step's writes on one stream, so
    regime ``ordered`` gives freed blocks to the pool at once; under ``fenced`` they wait for the next ``advance`` and
    a ``reap``.
    """

    name: ClassVar[str]
    spec: KVSpec
    store: KVStore
    pool: BlockPool
    tables: TokenTable

    def _make_store(self, spec: KVSpec) -> KVStore:
        raise NotImplementedError(f"{type(self).__name__} lacks _make_store: return a KVStore of this shape from it")

    def allocate(self, spec: KVSpec) -> None:
        self.store = self._make_store(spec)
        self.spec = spec
        self.pool = BlockPool(spec.num_blocks)
        self.tables = TokenTable(spec.block_size)
        self._rows: dict[ReqId, int] = {}
        self._free_rows = list(range(spec.max_num_reqs - 1, -1, -1))
        self._in_flight: set[ReqId] = set()
        self._step = 0
        self.store.set_free(range(1, spec.num_blocks), True)

    # -- requests ----------------------------------------------------------------------------------------------------

    def admit(self, req_id: ReqId) -> None:
        self._claim_row(req_id)
        self._sync_row(self.tables.add(req_id))

    def fork_prefix(self, parent_id: ReqId, child_id: ReqId, num_tokens: int) -> None:
        shared = self.tables.prefix_blocks(parent_id, num_tokens)
        self._claim_row(child_id)
        self.pool.share(shared)
        table = self.tables.add(child_id)
        table.sync_new_tokens(shared, num_tokens)
        self._sync_row(table)

    def finish(self, req_id: ReqId) -> None:
        table = self.tables.pop(req_id)
        row = self._rows.pop(req_id)
        fence = self._step + 1 if req_id in self._in_flight and self.spec.regime == "fenced" else None
        self._in_flight.discard(req_id)
        self._mark_free(self.pool.free(table.block_ids, fence))
        self.store.set_row(row, (), ())
        self._free_rows.append(row)

    def preempt(self, req_id: ReqId) -> None:
        self.finish(req_id)

    # -- tokens ------------------------------------------------------------------------------------------------------

    def append(self, req_id: ReqId, num_tokens: int, kv: Buffer) -> None:
        start = self.tables[req_id].num_computed_tokens
        self._check_kv(num_tokens, kv)
        self.store.write(self.reserve(req_id, num_tokens), range(start, start + num_tokens), kv)

    def reserve(self, req_id: ReqId, num_tokens: int) -> list[SlotId]:
        """``append`` without the bytes: registers the next positions and returns their slots, for a forward to write.

        Raises PoolExhausted with nothing changed. No plan of the request may be launched before they are written.
        """
        table = self.tables[req_id]
        self._check_count(num_tokens)
        new_blocks = self.pool.allocate(table.num_blocks_needed(num_tokens))
        first, total = table.cursor, table.num_computed_tokens + num_tokens
        table.sync_new_tokens([*table.block_ids, *new_blocks] if new_blocks else table.block_ids, total)
        if new_blocks:
            self.store.set_free(new_blocks, False)
            self._sync_row(table)
        else:
            self._sync_words(table, range(first, first + num_tokens))
        return [table.slot_at(index) for index in range(first, first + num_tokens)]

    def doom(self, req_id: ReqId, positions: Iterable[Position]) -> None:
        self.tables[req_id].doom(positions)

    def kill(self, req_id: ReqId, positions: Iterable[Position]) -> list[Position]:
        table = self.tables[req_id]
        killed = table.evict_tokens(positions)
        self._sync_words(table, [table.table_slot_of(position) for position in killed])
        return killed

    def recycle(self, req_id: ReqId, kv: Buffer) -> None:
        position = self.tables[req_id].num_computed_tokens
        self._check_kv(1, kv)
        self.store.write([self.reserve_recycled(req_id)], [position], kv)

    def reserve_recycled(self, req_id: ReqId) -> SlotId:
        """``recycle`` without the bytes: the next position takes the next doomed token's slot, which is returned."""
        table = self.tables[req_id]
        victim = recyclable(table, self.pool)
        if victim is None:
            raise SpecError(f"recycle: request {req_id!r} has no doomed token in a private slot: kill it and append")
        return table.recycle(victim, table.num_computed_tokens)

    # -- reclamation -------------------------------------------------------------------------------------------------

    def launch(self, plan: ReclamationPlan) -> Ticket:
        table = self.tables[plan.req_id]
        self.pool.check_take(plan.new_block_ids)
        self._check_targets(plan)
        table.apply_plan(plan)
        self.pool.take(plan.new_block_ids)
        self.store.move(plan.moves)
        self.store.set_free(plan.new_block_ids, False)
        self._sync_row(table)
        fence = self._step + 1 if self.spec.regime == "fenced" else None
        self._mark_free(self.pool.free(plan.freed_block_ids, fence))
        if fence is None:
            table.plan_done()
            return Ticket(plan.req_id, len(plan.moves), ())
        self._in_flight.add(plan.req_id)
        fenced = tuple(block for block in plan.freed_block_ids if not self.pool.ref_cnt(block))
        return Ticket(plan.req_id, len(plan.moves), fenced)

    def advance(self) -> None:
        self._step += 1
        self.pool.begin_pass()
        for req_id in self._in_flight:
            self.tables[req_id].plan_done()
        self._in_flight.clear()

    def reap(self) -> list[BlockId]:
        freed = self.pool.reap(self._step)
        self._mark_free(freed)
        return freed

    # -- reading -----------------------------------------------------------------------------------------------------

    def attend(self, req_id: ReqId, q: Buffer, num_queries: int = 1) -> Attention:
        table = self.tables[req_id]
        end = table.num_computed_tokens
        if not 1 <= num_queries <= end:
            raise SpecError(f"attend: num_queries={num_queries}, request {req_id!r} has {end} computed tokens")
        if len(q) != num_queries * self.spec.query_elements * 4:
            raise SpecError(
                f"attend: q has {len(q)} bytes, {num_queries} queries need {num_queries * self.spec.query_elements * 4}"
            )
        return self.store.attend(self._rows[req_id], q, range(end - num_queries, end))

    def observe(self) -> Observation:
        requests = {req_id: self.store.read_row(row) for req_id, row in self._rows.items()}
        return Observation(requests, self.store.read_free(), self.spec.num_blocks)

    def fingerprint(self, req_id: ReqId) -> str:
        return self.store.fingerprint_row(self.row_of(req_id))

    def table_view(self, req_id: ReqId) -> RequestTable:
        return self.tables[req_id]

    def pool_view(self) -> BlockPool:
        return self.pool

    def row_of(self, req_id: ReqId) -> int:
        """The request's row in the store's tables."""
        return self._rows[self.tables[req_id].req_id]

    # -- to the store ------------------------------------------------------------------------------------------------

    def _check_count(self, num_tokens: int) -> None:
        if num_tokens < 1:
            raise SpecError(f"num_tokens={num_tokens}: write at least one token")

    def _check_kv(self, num_tokens: int, kv: Buffer) -> None:
        self._check_count(num_tokens)
        if len(kv) != num_tokens * self.spec.token_bytes:
            raise SpecError(f"kv has {len(kv)} bytes, {num_tokens} tokens need {num_tokens * self.spec.token_bytes}")

    def _check_targets(self, plan: ReclamationPlan) -> None:
        blocks = {move.dst_slot // self.spec.block_size for move in plan.moves}
        for block in sorted(blocks.difference(plan.new_block_ids)):
            if not self.pool.is_private(block):
                raise SpecError(
                    f"INV-7: plan of request {plan.req_id!r} writes into block {block}, which is shared or hashed: "
                    "plan again"
                )

    def _claim_row(self, req_id: ReqId) -> None:
        if req_id in self._rows:
            raise SpecError(f"request {req_id!r} is already admitted: finish or preempt it first")
        if not self._free_rows:
            raise SpecError(f"all {self.spec.max_num_reqs} request rows are taken: raise max_num_reqs")
        self._rows[req_id] = self._free_rows.pop()

    def _sync_row(self, table: RequestTable) -> None:
        self.store.set_row(self._rows[table.req_id], table.block_ids, table.live_words)

    def _sync_words(self, table: RequestTable, table_slots: Iterable[int]) -> None:
        indices = sorted({slot // table.block_size for slot in table_slots})
        self.store.set_words(self._rows[table.req_id], indices, [table.live_words[i] for i in indices])

    def _mark_free(self, block_ids: Sequence[BlockId]) -> None:
        self.store.set_free(block_ids, True)
