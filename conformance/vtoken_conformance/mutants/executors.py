"""Mutants whose bookkeeping is wrong, while their arrays do as they are told."""

from collections.abc import Iterable
from dataclasses import replace

from vtoken.errors import PoolExhausted
from vtoken.executor import Buffer, Ticket
from vtoken.reclamation.plan import ReclamationPlan
from vtoken.reference import ReferenceExecutor
from vtoken.types import BlockId, Position, ReqId

__all__ = ["EXECUTOR_MUTANTS"]


class OneBlockTooMany(ReferenceExecutor):
    """A block is added as soon as the last one is full."""

    def append(self, req_id: ReqId, num_tokens: int, kv: Buffer) -> None:
        super().append(req_id, num_tokens, kv)
        table = self.tables[req_id]
        if table.cursor == len(table.block_ids) * table.block_size and self.pool.num_free:
            (block,) = self.pool.allocate(1)
            table.sync_new_tokens([*table.block_ids, block], table.num_computed_tokens)
            self.store.set_free([block], False)
            self._sync_row(table)


class TakesWhatFits(ReferenceExecutor):
    """An append that does not fit writes the tokens that do, and then raises."""

    def append(self, req_id: ReqId, num_tokens: int, kv: Buffer) -> None:
        try:
            super().append(req_id, num_tokens, kv)
        except PoolExhausted:
            table = self.tables[req_id]
            room = (len(table.block_ids) + self.pool.num_free) * table.block_size - table.cursor
            if room:
                super().append(req_id, room, kv[: room * self.spec.token_bytes])
            raise


class DoomKills(ReferenceExecutor):
    """A doomed token dies at once."""

    def doom(self, req_id: ReqId, positions: Iterable[Position]) -> None:
        chosen = list(positions)
        super().doom(req_id, chosen)
        self.kill(req_id, chosen)


class SortedQueue(ReferenceExecutor):
    """Victims queue by position."""

    def doom(self, req_id: ReqId, positions: Iterable[Position]) -> None:
        super().doom(req_id, sorted(positions))


class HalfRefusedKill(ReferenceExecutor):
    """A kill with a bad position kills the others before it raises."""

    def kill(self, req_id: ReqId, positions: Iterable[Position]) -> list[Position]:
        return [killed for position in positions for killed in super(HalfRefusedKill, self).kill(req_id, [position])]


class KillInAllHolders(ReferenceExecutor):
    """The mask belongs to the block: what dies for one holder dies for all."""

    def kill(self, req_id: ReqId, positions: Iterable[Position]) -> list[Position]:
        killed = super().kill(req_id, positions)
        mine = self.tables[req_id].block_ids
        for other in self.tables.values():
            shared = [position for position in killed if other.block_ids and other.block_ids[0] in mine]
            other.evict_tokens([position for position in shared if position < other.num_computed_tokens])
            self._sync_row(other)
        return killed


class RecycleAtCursor(ReferenceExecutor):
    """The table gives the victim's slot to the new token, which is written at the cursor."""

    def recycle(self, req_id: ReqId, kv: Buffer) -> None:
        table, write = self.tables[req_id], self.store.write
        at_cursor = table.slot_at(min(table.cursor, len(table.block_ids) * table.block_size - 1))
        self.store.write = lambda slots, positions, kv: write([at_cursor], positions, kv)  # type: ignore[method-assign]  # for one call
        try:
            super().recycle(req_id, kv)
        finally:
            self.store.write = write  # type: ignore[method-assign]


class EarlyFree(ReferenceExecutor):
    """Blocks of a plan are free at its launch, fence or not."""

    def launch(self, plan: ReclamationPlan) -> Ticket:
        ticket = super().launch(plan)
        self._mark_free(self.pool.reap(self._step + 1))
        return ticket


class EarlyReap(ReferenceExecutor):
    """A reap gives back what waits for the next step."""

    def reap(self) -> list[BlockId]:
        self._step += 1
        freed = super().reap()
        self._step -= 1
        return freed


class StaleCursor(ReferenceExecutor):
    """A packed layout is appended to where the unpacked one ended."""

    def launch(self, plan: ReclamationPlan) -> Ticket:
        table = self.tables[plan.req_id]
        cursor = table.cursor
        ticket = super().launch(plan)
        table.cursor = min(cursor, len(table.block_ids) * table.block_size)
        return ticket


class StalePlan(ReferenceExecutor):
    """A plan is taken whatever has happened since it was made."""

    def launch(self, plan: ReclamationPlan) -> Ticket:
        table = self.tables[plan.req_id]
        return super().launch(
            replace(
                plan,
                layout_version=table.layout_version,
                liveness_version=table.liveness_version,
                num_live_tokens=table.num_live_tokens,
            )
        )


class FreedSharedBlock(ReferenceExecutor):
    """A request that ends frees its blocks, whoever else holds them."""

    def finish(self, req_id: ReqId) -> None:
        blocks = list(self.tables[req_id].block_ids) if req_id in self.tables else []
        super().finish(req_id)
        self.store.set_free(blocks, True)


class LeakAtPreempt(ReferenceExecutor):
    """A preemption gives back ``computed // block_size`` blocks: the partly filled one is lost."""

    def preempt(self, req_id: ReqId) -> None:
        table = self.tables[req_id]
        if table.cursor % table.block_size:
            self.pool.share(table.block_ids[-1:])
        super().preempt(req_id)


class ForkWithoutKV(ReferenceExecutor):
    """A child's last block is a fresh one that nobody has written."""

    def fork_prefix(self, parent_id: ReqId, child_id: ReqId, num_tokens: int) -> None:
        super().fork_prefix(parent_id, child_id, num_tokens)
        table = self.tables[child_id]
        fresh = self.pool.allocate(1)
        self.pool.free(table.block_ids[-1:])
        table.block_ids[-1:] = fresh
        self.store.set_free(fresh, False)
        self._sync_row(table)


EXECUTOR_MUTANTS: dict[str, type[ReferenceExecutor]] = {
    mutant.__name__: mutant
    for mutant in (
        DoomKills,
        EarlyFree,
        EarlyReap,
        ForkWithoutKV,
        FreedSharedBlock,
        HalfRefusedKill,
        KillInAllHolders,
        LeakAtPreempt,
        OneBlockTooMany,
        RecycleAtCursor,
        SortedQueue,
        StaleCursor,
        StalePlan,
        TakesWhatFits,
    )
}
"""These executors, by name."""
