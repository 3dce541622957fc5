"""INV-1 to INV-8 (SPEC §8), one function each. Each raises InvariantError: number, request, slot, expected, got.

They re-derive what they check, in O(tokens) or O(blocks), and are meant for tests and for verification online.
"""

from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import NoReturn

from vtoken.block_pool import BlockPool
from vtoken.errors import InvariantError
from vtoken.reclamation.plan import ReclamationPlan
from vtoken.request_table import RequestTable
from vtoken.types import NULL_BLOCK_ID, Move, Position, ReqId, SlotId

__all__ = [
    "check_accounting",
    "check_all",
    "check_conservation",
    "check_counts",
    "check_launch",
    "check_plan",
    "check_unique_mapping",
    "check_visibility",
    "check_writes",
]


def check_conservation(req_id: ReqId, before: Mapping[Position, Hashable], after: Mapping[Position, Hashable]) -> None:
    """INV-1: a relocation keeps the live positions and their KV (bytes, or a fingerprint of them, by position)."""
    for position in sorted({*before, *after}):
        if position not in after or position not in before or before[position] != after[position]:
            _fail(1, req_id, f"position {position}", before.get(position, "dead"), after.get(position, "dead"))


def check_unique_mapping(tables: Mapping[ReqId, RequestTable], pool: BlockPool) -> None:
    """INV-2: one slot for each live position and one position for each slot, before the cursor; holders as counted."""
    holders: Counter[int] = Counter()
    for req_id, table in tables.items():
        holders.update(table.block_ids)
        table_slots = list(table.live_table_slots())
        for table_slot in table_slots:
            position = table.position_at(table_slot)
            slot = f"table slot of position {position}, seen live in slot {table.slot_at(table_slot)}"
            place = table.table_slot_of(position) if table.is_live(position) else "none, it is dead"
            if place != table_slot:
                _fail(2, req_id, slot, place, table_slot)
            if table_slot >= table.cursor:
                _fail(2, req_id, slot, f"before the cursor, {table.cursor}", table_slot)
        if len(table_slots) != table.num_live_tokens:
            _fail(2, req_id, "live positions with a slot", table.num_live_tokens, len(table_slots))
    for block, count in holders.items():
        if pool.ref_cnt(block) != count:
            _fail(2, None, f"holders of block {block}", pool.ref_cnt(block), count)


def check_visibility(req_id: ReqId, touched: Iterable[SlotId], pending: Iterable[Move]) -> None:
    """INV-3: a step that does not wait for pending copies touches none of their slots."""
    busy = {slot for move in pending for slot in (move.src_slot, move.dst_slot)}
    for slot in touched:
        if slot in busy:
            _fail(3, req_id, f"slot {slot}", "no pending copy", "read or written before its copy is done")


def check_plan(plan: ReclamationPlan, table: RequestTable) -> None:
    """INV-4: made from the table's version, none in flight, profitable (or packed afterwards)."""
    if table.plan_in_flight:
        _fail(4, plan.req_id, "plans in flight", 0, 1)
    if plan.layout_version != table.layout_version:
        _fail(4, plan.req_id, "layout version", table.layout_version, plan.layout_version)
    if not plan.packed and plan.num_blocks_gained < 1:
        _fail(4, plan.req_id, "blocks freed net", "at least 1", plan.num_blocks_gained)
    if plan.packed:
        num_full, rest = divmod(table.num_live_tokens, table.block_size)
        packed = [(1 << table.block_size) - 1] * num_full + [(1 << rest) - 1] * bool(rest)
        words = _words_after(plan, table)
        if words != packed:
            _fail(4, plan.req_id, "live words after a packed plan", packed, words)


def _words_after(plan: ReclamationPlan, table: RequestTable) -> list[int]:
    size = table.block_size
    words = dict(zip(table.block_ids, table.live_words, strict=True)) | dict.fromkeys(plan.new_block_ids, 0)
    for move in plan.moves:
        words[move.src_slot // size] = words.get(move.src_slot // size, 0) & ~(1 << move.src_slot % size)
    for move in plan.moves:
        words[move.dst_slot // size] = words.get(move.dst_slot // size, 0) | 1 << move.dst_slot % size
    return [word for block, word in words.items() if block not in plan.freed_block_ids]


def check_launch(
    plans: Sequence[ReclamationPlan], tables: Mapping[ReqId, RequestTable], freed_in_pass: Iterable[int] = ()
) -> None:
    """INV-5: over all moves of one launch, before they are committed. Two holders may both read a shared slot."""
    live = {slot for table in tables.values() for slot in table.live_slots()}
    freed = set(freed_in_pass)
    destinations: set[SlotId] = set()
    for plan in plans:
        size = tables[plan.req_id].block_size
        for slot, count in Counter(move.src_slot for move in plan.moves).items():
            if count > 1:
                _fail(5, plan.req_id, f"source slot {slot}", "named once", f"named {count} times")
        for move in plan.moves:
            if move.src_slot not in live:
                _fail(5, plan.req_id, f"source slot {move.src_slot}", "live", "dead")
            if move.dst_slot in live:
                _fail(5, plan.req_id, f"destination slot {move.dst_slot}", "dead", "live")
            if move.dst_slot // size in freed:
                _fail(
                    5, plan.req_id, f"destination slot {move.dst_slot}", "a block not freed in this pass", "freed in it"
                )
            if move.dst_slot in destinations:
                _fail(5, plan.req_id, f"destination slot {move.dst_slot}", "named once", "named twice")
            destinations.add(move.dst_slot)


def check_accounting(tables: Mapping[ReqId, RequestTable], pool: BlockPool) -> None:
    """INV-6: free + held + in flight = all blocks but the null block, each counted once."""
    held = {block for table in tables.values() for block in table.block_ids}
    counted = Counter([*pool.free_block_ids(), *held, *pool.fenced_block_ids()])
    for block in range(1, pool.num_blocks):
        if counted[block] != 1:
            _fail(6, None, f"block {block} among free, held and in flight", "once", f"{counted[block]} times")
    if counted.keys() - range(1, pool.num_blocks):
        _fail(6, None, "blocks outside the pool", "none", sorted(counted.keys() - range(1, pool.num_blocks)))


def check_writes(req_id: ReqId, slots: Iterable[SlotId], pool: BlockPool, block_size: int) -> None:
    """INV-7: shared, hashed and null blocks are never written."""
    for block in sorted({slot // block_size for slot in slots}):
        if block == NULL_BLOCK_ID or not pool.is_private(block):
            _fail(
                7,
                req_id,
                f"block {block}",
                "private to be written",
                f"ref_cnt {pool.ref_cnt(block)}, shared, hashed or null",
            )


def check_counts(table: RequestTable) -> None:
    """INV-8: live = computed - evicted, and the live words say the same."""
    expected = table.num_computed_tokens - table.num_evicted_tokens
    in_words = sum(word.bit_count() for word in table.live_words)
    if not expected == table.num_live_tokens == in_words:
        _fail(
            8,
            table.req_id,
            "live tokens (computed - evicted)",
            expected,
            f"{table.num_live_tokens}, {in_words} in live words",
        )


def check_all(tables: Mapping[ReqId, RequestTable], pool: BlockPool) -> None:
    """The invariants of a state at rest: INV-2, INV-6, INV-8."""
    check_unique_mapping(tables, pool)
    check_accounting(tables, pool)
    for table in tables.values():
        check_counts(table)


def _fail(number: int, req_id: ReqId | None, where: str, expected: object, got: object) -> NoReturn:
    request = "" if req_id is None else f"request {req_id!r}, "
    raise InvariantError(f"INV-{number}: {request}{where}: expected {expected}, got {got}")
