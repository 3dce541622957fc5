"""The allocation rule ``recycle``: a decode token is written over the next doomed one (SPEC C-1 to C-3)."""

from vtoken.reclamation.plan import PoolView, TableView
from vtoken.types import Position

__all__ = ["recyclable"]


def recyclable(table: TableView, pool: PoolView) -> Position | None:
    """The next doomed token, if a step that writes one token may take its slot now; else None. O(1)."""
    head = table.next_doomed(1)
    if not head or table.plan_in_flight:
        return None
    block = table.block_ids[table.table_slot_of(head[0]) // table.block_size]
    return head[0] if pool.is_private(block) else None
