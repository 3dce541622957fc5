"""Planner ``release`` (SPEC R-4): what a paged engine can free without moving a token."""

from vtoken.reclamation.plan import PoolView, ReclamationPlan, TableView

__all__ = ["ReleasePlanner"]


class ReleasePlanner:
    """Lets go of blocks whose tokens are all dead; the only planner of the variant ``naive`` (paper: Naive-Evict)."""

    def plan(self, table: TableView, pool: PoolView) -> ReclamationPlan | None:
        dead = tuple(block for block, word in zip(table.block_ids[:-1], table.live_words[:-1], strict=True) if not word)
        if table.plan_in_flight or not dead:
            return None
        return ReclamationPlan(
            req_id=table.req_id,
            layout_version=table.layout_version,
            liveness_version=table.liveness_version,
            num_live_tokens=table.num_live_tokens,
            moves=(),
            freed_block_ids=dead,
        )
