"""Slots for a forward pass: the spec's tables and pool over a runner's store, driven by the spec's scheduler."""

from typing import ClassVar

from vtoken.config import VTokenConfig
from vtoken.executor import KVSpec, Ticket
from vtoken.paged_executor import KVStore, PagedExecutor
from vtoken.reclamation.plan import ReclamationPlan
from vtoken.scheduler import KVScheduler
from vtoken.serving.protocol import ModelRunner
from vtoken.types import ReqId, SlotId
from vtoken.victims import VictimSource

__all__ = ["RunnerPool", "SlotScheduler"]


class RunnerPool(PagedExecutor):
    """Tables and pool of a model runner. ``plans`` are those of the running pass."""

    name: ClassVar[str] = "serving"

    def __init__(self, runner: ModelRunner, spec: KVSpec) -> None:
        self.runner = runner
        self.plans: list[ReclamationPlan] = []
        self.allocate(spec)

    def _make_store(self, spec: KVSpec) -> KVStore:
        return self.runner.make_store(spec)

    def launch(self, plan: ReclamationPlan) -> Ticket:
        ticket = super().launch(plan)
        self.plans.append(plan)
        return ticket

    def finish(self, req_id: ReqId) -> None:
        self.runner.forget(self.row_of(req_id))
        super().finish(req_id)


class SlotScheduler(KVScheduler):
    """A ``KVScheduler`` whose tokens are written by a forward pass.

    All rows take their slots before the forward runs, so room is made for all of them first (``blocks_short``): a plan
    launched after a request took its slots would move tokens that are not written yet.
    """

    def __init__(self, config: VTokenConfig, pool: RunnerPool, victims: VictimSource) -> None:
        super().__init__(config, pool, victims)
        self.slots = pool

    def admit_child(
        self, req_id: ReqId, parent_id: ReqId, num_shared: int, trace_key: int, prompt_len: int, total_len: int
    ) -> None:
        """``admit`` of a request that begins with its parent's first ``num_shared`` tokens."""
        self.slots.fork_prefix(parent_id, req_id, num_shared)
        self.follow(req_id, trace_key, prompt_len, total_len)

    def num_new_blocks(self, req_id: ReqId) -> int:
        """Blocks that the request's tokens of this pass take."""
        running = self._running[req_id]
        return 0 if running.recycles else self.slots.tables[req_id].num_blocks_needed(running.num_writing)

    def reserve(self, req_id: ReqId) -> list[SlotId]:
        """Slots of the tokens that ``begin_pass`` was told of: over a doomed one, or at the cursor."""
        running = self._running[req_id]
        if running.recycles:
            slot = self.slots.reserve_recycled(req_id)
            self._count_recycle(running)
            return [slot]
        self._kill_due(req_id, running)
        return self.slots.reserve(req_id, running.num_writing)
