"""INV-1 to INV-8 (SPEC §8), one function each. Each raises Violation: number, request, slot, expected, got.

They re-derive what they check, in O(tokens) or O(blocks), and are meant for tests and for verification online.
"""

from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Protocol

from vtoken.errors import InvariantError
from vtoken.reclamation.plan import ReclamationPlan
from vtoken.request_table import RequestTable
from vtoken.types import NULL_BLOCK_ID, BlockId, Move, Position, ReqId, SlotId

__all__ = [
    "HoldsBlocks",
    "PoolBooks",
    "ShowsSlots",
    "Violation",
    "check_accounting",
    "check_all",
    "check_conservation",
    "check_counts",
    "check_holders",
    "check_launch",
    "check_mapping",
    "check_packed",
    "check_plan",
    "check_unique_mapping",
    "check_visibility",
    "check_writes",
]


class Violation(InvariantError):
    """One invariant that does not hold. ``req_id`` and ``block_id`` are None where it is not about one of them."""

    def __init__(
        self,
        number: int,
        req_id: ReqId | None,
        where: str,
        expected: object,
        got: object,
        slots: Sequence[SlotId] = (),
        block_id: BlockId | None = None,
    ) -> None:
        request = "" if req_id is None else f"request {req_id!r}, "
        super().__init__(f"INV-{number}: {request}{where}: expected {expected}, got {got}")
        self.number = number
        self.req_id = req_id
        self.where = where
        self.expected = expected
        self.got = got
        self.slots = tuple(slots)
        self.block_id = block_id


class HoldsBlocks(Protocol):
    """A request as its blocks alone."""

    @property
    def block_ids(self) -> Sequence[BlockId]: ...


class ShowsSlots(Protocol):
    """A request as its live slots alone."""

    @property
    def block_size(self) -> int: ...

    def live_slots(self) -> Sequence[SlotId]: ...


class PoolBooks(Protocol):
    """What a pool says of its blocks."""

    @property
    def num_blocks(self) -> int: ...

    def ref_cnt(self, block_id: BlockId) -> int: ...

    def is_private(self, block_id: BlockId) -> bool: ...

    def free_block_ids(self) -> Sequence[BlockId]: ...

    def fenced_block_ids(self) -> Sequence[BlockId]: ...


def check_conservation(req_id: ReqId, before: Mapping[Position, Hashable], after: Mapping[Position, Hashable]) -> None:
    """INV-1: a relocation keeps the live positions and their KV (bytes, or a fingerprint of them, by position)."""
    for position in sorted({*before, *after}):
        if position not in after or position not in before or before[position] != after[position]:
            was, is_now = before.get(position, "dead"), after.get(position, "dead")
            raise Violation(1, req_id, f"position {position}", was, is_now)


def check_unique_mapping(tables: Mapping[ReqId, RequestTable], pool: PoolBooks) -> None:
    """INV-2: one slot for each live position and one position for each slot, before the cursor; holders as counted."""
    for table in tables.values():
        check_mapping(table)
    check_holders(tables, pool)


def check_mapping(table: RequestTable) -> None:
    """INV-2 inside one request."""
    table_slots = list(table.live_table_slots())
    for table_slot in table_slots:
        position, slot = table.position_at(table_slot), table.slot_at(table_slot)
        what = f"table slot of position {position}, seen live in slot {slot}"
        place = table.table_slot_of(position) if table.is_live(position) else "none, it is dead"
        if place != table_slot:
            raise Violation(2, table.req_id, what, place, table_slot, (slot,))
        if table_slot >= table.cursor:
            raise Violation(2, table.req_id, what, f"before the cursor, {table.cursor}", table_slot, (slot,))
    if len(table_slots) != table.num_live_tokens:
        raise Violation(2, table.req_id, "live positions with a slot", table.num_live_tokens, len(table_slots))


def check_holders(holders: Mapping[ReqId, HoldsBlocks], pool: PoolBooks) -> None:
    """INV-2 between requests: a block has as many holders as the pool has counted."""
    counted = Counter(block for holder in holders.values() for block in holder.block_ids)
    for block, count in counted.items():
        if pool.ref_cnt(block) != count:
            raise Violation(2, None, f"holders of block {block}", pool.ref_cnt(block), count, block_id=block)


def check_visibility(req_id: ReqId, touched: Iterable[SlotId], pending: Iterable[Move]) -> None:
    """INV-3: a step that does not wait for pending copies touches none of their slots."""
    busy = {slot for move in pending for slot in (move.src_slot, move.dst_slot)}
    for slot in touched:
        if slot in busy:
            raise Violation(
                3, req_id, f"slot {slot}", "no pending copy", "read or written before its copy is done", (slot,)
            )


def check_plan(plan: ReclamationPlan, table: RequestTable) -> None:
    """INV-4: made from the table's version, none in flight, profitable (or packed afterwards)."""
    if table.plan_in_flight:
        raise Violation(4, plan.req_id, "plans in flight", 0, 1)
    if plan.layout_version != table.layout_version:
        raise Violation(4, plan.req_id, "layout version", table.layout_version, plan.layout_version)
    if not plan.packed and plan.num_blocks_gained < 1:
        raise Violation(4, plan.req_id, "blocks freed net", "at least 1", plan.num_blocks_gained)
    if plan.packed:
        num_full, rest = divmod(table.num_live_tokens, table.block_size)
        packed = [(1 << table.block_size) - 1] * num_full + [(1 << rest) - 1] * bool(rest)
        words = _words_after(plan, table)
        if words != packed:
            raise Violation(4, plan.req_id, "live words after a packed plan", packed, words)


def _words_after(plan: ReclamationPlan, table: RequestTable) -> list[int]:
    size = table.block_size
    words = dict(zip(table.block_ids, table.live_words, strict=True)) | dict.fromkeys(plan.new_block_ids, 0)
    for move in plan.moves:
        words[move.src_slot // size] = words.get(move.src_slot // size, 0) & ~(1 << move.src_slot % size)
    for move in plan.moves:
        words[move.dst_slot // size] = words.get(move.dst_slot // size, 0) | 1 << move.dst_slot % size
    return [word for block, word in words.items() if block not in plan.freed_block_ids]


def check_packed(table: RequestTable) -> None:
    """INV-4, at rest: live tokens fill the first slots of the block list, which is all that eager mode leaves."""
    if table.cursor != table.num_live_tokens:
        raise Violation(4, table.req_id, "cursor of a packed layout", table.num_live_tokens, table.cursor)


def check_launch(
    plans: Sequence[ReclamationPlan], tables: Mapping[ReqId, ShowsSlots], freed_in_pass: Iterable[int] = ()
) -> None:
    """INV-5: over all moves of one launch, before they are committed. Two holders may both read a shared slot."""
    live = {slot for table in tables.values() for slot in table.live_slots()}
    freed = set(freed_in_pass)
    destinations: set[SlotId] = set()
    for plan in plans:
        size = tables[plan.req_id].block_size
        for slot, count in Counter(move.src_slot for move in plan.moves).items():
            if count > 1:
                raise Violation(5, plan.req_id, f"source slot {slot}", "named once", f"named {count} times", (slot,))
        for move in plan.moves:
            source, target = f"source slot {move.src_slot}", f"destination slot {move.dst_slot}"
            slots = (move.src_slot, move.dst_slot)
            if move.src_slot not in live:
                raise Violation(5, plan.req_id, source, "live", "dead", slots)
            if move.dst_slot in live:
                raise Violation(5, plan.req_id, target, "dead", "live", slots)
            if move.dst_slot // size in freed:
                raise Violation(5, plan.req_id, target, "a block not freed in this pass", "freed in it", slots)
            if move.dst_slot in destinations:
                raise Violation(5, plan.req_id, target, "named once", "named twice", slots)
            destinations.add(move.dst_slot)


def check_accounting(holders: Mapping[ReqId, HoldsBlocks], pool: PoolBooks) -> None:
    """INV-6: free + held + in flight = all blocks but the null block, each counted once."""
    held = {block for holder in holders.values() for block in holder.block_ids}
    counted = Counter([*pool.free_block_ids(), *held, *pool.fenced_block_ids()])
    for block in range(1, pool.num_blocks):
        if counted[block] != 1:
            what, times = f"block {block} among free, held and in flight", f"{counted[block]} times"
            raise Violation(6, None, what, "once", times, block_id=block)
    outside = sorted(counted.keys() - range(1, pool.num_blocks))
    if outside:
        raise Violation(6, None, "blocks outside the pool", "none", outside, block_id=outside[0])


def check_writes(req_id: ReqId, slots: Iterable[SlotId], pool: PoolBooks, block_size: int) -> None:
    """INV-7: shared, hashed and null blocks are never written."""
    written = sorted(slots)
    for block in dict.fromkeys(slot // block_size for slot in written):
        if block == NULL_BLOCK_ID or not pool.is_private(block):
            raise Violation(
                7,
                req_id,
                f"block {block}",
                "private to be written",
                f"ref_cnt {pool.ref_cnt(block)}, shared, hashed or null",
                [slot for slot in written if slot // block_size == block],
                block,
            )


def check_counts(table: RequestTable) -> None:
    """INV-8: live = computed - evicted, and the live words say the same."""
    expected = table.num_computed_tokens - table.num_evicted_tokens
    in_words = sum(word.bit_count() for word in table.live_words)
    if not expected == table.num_live_tokens == in_words:
        got = f"{table.num_live_tokens}, {in_words} in live words"
        raise Violation(8, table.req_id, "live tokens (computed - evicted)", expected, got)


def check_all(tables: Mapping[ReqId, RequestTable], pool: PoolBooks) -> None:
    """The invariants of a state at rest: INV-2, INV-6, INV-8."""
    check_unique_mapping(tables, pool)
    check_accounting(tables, pool)
    for table in tables.values():
        check_counts(table)
