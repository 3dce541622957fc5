"""When a plan is made: the paper's trigger for lazy mode, at every chance for eager mode (SPEC M-4)."""

from collections import Counter

from vtoken.config import VTokenConfig
from vtoken.reclamation.evacuate import EvacuatePlanner
from vtoken.reclamation.fill import FillPlanner
from vtoken.reclamation.plan import Planner, PoolView, ReclamationPlan, TableView
from vtoken.reclamation.release import ReleasePlanner
from vtoken.types import ReqId, cdiv

__all__ = ["ReclamationManager"]


class ReclamationManager:
    """Decides for one request at a time whether a plan is worth making, and has its planner make it.

    ``check`` is O(1) whatever the length, and comes before any planner looks at a block. ``num_plans`` and
    ``num_moves`` count what was planned, ``refused`` counts reasons.
    """

    def __init__(self, config: VTokenConfig) -> None:
        self.config = config
        self.num_plans = 0
        self.num_moves = 0
        self.refused: Counter[str] = Counter()
        self._evacuate = EvacuatePlanner(config.source_utilization)
        self._fill = FillPlanner()
        self._release = ReleasePlanner()
        self._last_attempt: dict[ReqId, int] = {}
        self._last_release: dict[ReqId, tuple[int, int]] = {}  # (layout, liveness) versions at the last release

    def check(self, table: TableView, pool: PoolView, step: int, force: bool = False) -> bool:
        """Whether planning is due. ``force`` (no free block is left) skips the lazy watermark and rate limit."""
        if self.config.variant == "native" or table.plan_in_flight:
            return False
        if self.config.variant == "naive":
            has_holes = table.cursor != table.num_live_tokens
            seen = (table.layout_version, table.liveness_version)  # a dead tail block counts once another follows it
            return has_holes and self._last_release.get(table.req_id) != seen
        if self.config.mode == "eager":
            num_live = table.num_live_tokens
            return table.cursor != num_live or (len(table.block_ids) - 1) * table.block_size >= num_live
        return self._lazy_trigger(table, pool, step, force)

    def plan(self, table: TableView, pool: PoolView, step: int, force: bool = False) -> ReclamationPlan | None:
        """A plan for the request, or None. Records the attempt for the rate limit."""
        if not self.check(table, pool, step, force):
            return None
        if self.config.variant == "naive":
            self._last_release[table.req_id] = (table.layout_version, table.liveness_version)
            planner: Planner = self._release
        elif self.config.mode == "eager":
            planner = self._fill
        else:
            self._last_attempt[table.req_id] = step
            if not force and len(self._evacuate.source_counts(table, pool)) < self.config.min_source_blocks:
                self.refused["too few sources"] += 1
                return None
            planner = self._evacuate
        plan = planner.plan(table, pool)
        if plan is None:
            self.refused[self._reason(planner, table, pool)] += 1
            return None
        self.num_plans += 1
        self.num_moves += len(plan.moves)
        return plan

    def forget(self, req_id: ReqId) -> None:
        """Drops what is kept for a request that has ended or was preempted."""
        self._last_attempt.pop(req_id, None)
        self._last_release.pop(req_id, None)

    def _reason(self, planner: Planner, table: TableView, pool: PoolView) -> str:
        """Why the planner made none, although it was due."""
        if planner is self._release:
            return "no block without a live token"
        if planner is self._evacuate:
            counts = self._evacuate.source_counts(table, pool)
            if len(counts) <= cdiv(sum(counts.values()), table.block_size):
                return "not profitable"
        return "no target free"

    def _lazy_trigger(self, table: TableView, pool: PoolView, step: int, force: bool) -> bool:
        config = self.config
        held = len(table.block_ids) * table.block_size
        if held - table.num_live_tokens <= config.theta_fragmentation * held:
            return False
        if force:
            return True
        if pool.num_free > config.low_watermark * (pool.num_blocks - 1):
            return False
        last = self._last_attempt.get(table.req_id)
        return last is None or step - last >= config.cooldown_steps
