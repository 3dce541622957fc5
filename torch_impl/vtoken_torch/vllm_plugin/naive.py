"""The variant ``naive`` in vLLM: the same victims, but a block goes back only when all its tokens are dead.

vLLM's kernels read packed layouts, so the KV is packed here too; the blocks that a layout without moves would hold are
kept back (*parked*), by a second table that nothing ever moves in. Attention reads live slots alone, which favours the
baseline; the moves, which a real one would not make, burden it.
"""

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence

from vllm.v1.request import Request

from vtoken.errors import InvariantError
from vtoken.reclamation.fill import FillPlanner
from vtoken.reclamation.plan import ReclamationPlan, TableView
from vtoken.request_table import RequestTable
from vtoken.token_table import TokenTable
from vtoken.types import BlockId, Position, ReqId
from vtoken_torch.vllm_plugin.kv_spec import EvictingManager
from vtoken_torch.vllm_plugin.ledger import Ledger

__all__ = ["NaiveLedger"]


class NaiveLedger(Ledger):
    """The ``Evictor`` sees the unmoved tables, vLLM's kernels the packed ones."""

    def __init__(
        self, manager: EvictingManager, requests: Mapping[ReqId, Request], count: Callable[[ReqId], int]
    ) -> None:
        super().__init__(manager, requests, count)
        self.unmoved = TokenTable(manager.block_size)
        self._new_ids = itertools.count(1)
        self._fill = FillPlanner()
        manager.naive_blocks = self._num_held_with

    def admit(self, req_id: ReqId) -> None:
        super().admit(req_id)
        self.unmoved.add(req_id)

    def finish(self, req_id: ReqId) -> None:
        super().finish(req_id)
        self.unmoved.pop(req_id)

    preempt = finish

    def sync(self, req_id: ReqId, num_computed_tokens: int) -> None:
        super().sync(req_id, num_computed_tokens)
        table = self.unmoved[req_id]
        num_new = table.num_blocks_needed(num_computed_tokens - table.num_computed_tokens)
        table.sync_new_tokens(table.block_ids + self._ids(num_new), num_computed_tokens)

    def table_view(self, req_id: ReqId) -> TableView:
        return self._unmoved(req_id)

    def doom(self, req_id: ReqId, positions: Iterable[Position]) -> None:
        victims = list(positions)
        super().doom(req_id, victims)
        self.unmoved[req_id].doom(victims)

    def kill(self, req_id: ReqId, positions: Iterable[Position]) -> list[Position]:
        victims = list(positions)
        self._unmoved(req_id).evict_tokens(victims)
        killed = super().kill(req_id, victims)
        plan = self._fill.plan(self._tables[req_id], self.pool)
        if plan is not None:
            super().launch(plan)
        return killed

    def launch(self, plan: ReclamationPlan) -> None:
        """A release plan of the unmoved table: blocks whose tokens are all dead."""
        table = self.unmoved[plan.req_id]
        if plan.moves:
            raise InvariantError(f"naive: the plan of request {plan.req_id!r} moves {len(plan.moves)} tokens")
        table.apply_plan(plan)
        table.plan_done()
        self._unpark(plan.req_id)

    def num_blocks_needed(self, req_id: ReqId, num_tokens: int) -> int:
        return self._unmoved(req_id).num_blocks_needed(num_tokens)

    def _give_back(self, req_id: ReqId, block_ids: Sequence[BlockId]) -> None:
        """What packing frees stays parked, unless the unmoved layout holds no more than the packed one."""
        others = {index for index, block in enumerate(self.pool.blocks(block_ids)) if block.ref_cnt != 1}
        own = [block_id for index, block_id in enumerate(block_ids) if index not in others]
        self.pool.free(self.pool.blocks(block_ids[index] for index in sorted(others)))
        self.pool.forget_hashes(own)  # a parked block may be written again
        self.manager.parked.setdefault(req_id, []).extend(self.pool.blocks(own))
        self._unpark(req_id)

    def _unpark(self, req_id: ReqId) -> None:
        parked = self.manager.parked.get(req_id, [])
        num_allowed = max(0, len(self.unmoved[req_id].block_ids) - len(self._tables[req_id].block_ids))
        if len(parked) > num_allowed:
            self.pool.free(parked[num_allowed:])
            del parked[num_allowed:]

    def _num_held_with(self, req_id: ReqId, num_tokens: int) -> int:
        """Blocks that the unmoved layout holds once ``num_tokens`` are computed."""
        if req_id not in self.unmoved:
            return 0
        table = self._unmoved(req_id)
        return len(table.block_ids) + table.num_blocks_needed(num_tokens - table.num_computed_tokens)

    def _unmoved(self, req_id: ReqId) -> RequestTable:
        """The unmoved table, brought up to date."""
        self.table(req_id)
        return self.unmoved[req_id]

    def _ids(self, num_new: int) -> list[BlockId]:
        return [next(self._new_ids) for _ in range(num_new)]
