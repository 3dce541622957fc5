"""``EngineDriver`` in lazy mode: deaths only mark; the spec's trigger says when a request is evacuated (SPEC M-4)."""

from vtoken.eviction import Running
from vtoken.types import ReqId
from vtoken_torch.vllm_plugin.driver import EngineDriver
from vtoken_torch.vllm_plugin.lazy.ledger import LazyLedger

__all__ = ["LazyDriver"]


class LazyDriver(EngineDriver):
    """Nothing is recycled or packed."""

    ledger: LazyLedger

    def _begin(self, req_id: ReqId, running: Running, num_writing: int) -> None:
        """Deaths alone: plans follow for all requests with holes."""
        running.num_writing = num_writing
        running.recycles = False
        self._kill_due(req_id, running)

    def _reclaim_all(self) -> None:
        """Evacuates where the trigger says so, then wherever it helps if running requests could not grow."""
        self._unpacked.clear()
        with_holes = self.ledger.with_holes()
        for req_id in with_holes:
            self.reclaim(req_id)
        if with_holes and self._cannot_grow():
            for req_id in sorted(with_holes, key=self.ledger.num_holes, reverse=True):
                if self.reclaim(req_id, force=True) and not self._cannot_grow():
                    return

    def _cannot_grow(self) -> bool:
        """Whether no block would be left to evacuate into, once running requests have the blocks that they need."""
        pool, asked = self.ledger.pool, self._asked
        free = pool.num_free + pool.num_in_flight
        if free > len(self._running) + sum(asked.values()) // self.ledger.spec.block_size:
            return False
        least = {req_id: self.least_chunk(req_id, count) for req_id, count in asked.items()}
        num_needed = self.num_blocks_wanted(least)
        return num_needed > 0 and free <= num_needed

    def _blocks_to_give(self, req_id: ReqId, running: Running) -> int:
        """What dies gives blocks; holes that are there already are the trigger's."""
        return super()._blocks_to_give(req_id, running) - self.ledger.num_holes(req_id) // self.ledger.spec.block_size
