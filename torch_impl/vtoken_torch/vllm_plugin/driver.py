"""The spec's scheduler side, driven by vLLM's: the same deaths, plans and pressure, around vLLM's own allocation.

One pass, on vLLM's ``schedule()``:

    open_pass(...)      what the last step's tokens made due: choices, pressure, deaths, plans, tentative recycles
    (vLLM allocates and preempts; freed blocks serve waiting requests)
    close_pass(...)     recycles that vLLM gave no token are rolled back; new tokens join the tables
"""

from collections.abc import Mapping, Sequence
from typing import cast

from vtoken.config import VTokenConfig
from vtoken.executor import Executor
from vtoken.scheduler import KVScheduler, _Running
from vtoken.types import Position, ReqId, cdiv
from vtoken_torch.vllm_plugin.ledger import Ledger
from vtoken_torch.vllm_plugin.requests import RequestVictims

__all__ = ["EngineDriver"]


class EngineDriver(KVScheduler):
    """``KVScheduler`` for an engine that allocates by itself, and whose requests differ in policy and budget."""

    def __init__(self, config: VTokenConfig, ledger: Ledger, victims: RequestVictims) -> None:
        super().__init__(config, cast(Executor, ledger), victims)  # a ledger copies nothing, KVScheduler asks it not to
        self.ledger = ledger
        self.requests = victims
        self.num_postponed = 0  # kills that waited for a free block to copy survivors into
        self._tentative: dict[ReqId, tuple[Position, int]] = {}
        self._wrote: dict[ReqId, bool] = {}  # since the last pass; whether it was a prefill chunk

    def is_running(self, req_id: ReqId) -> bool:
        """Whether the request has a table."""
        return req_id in self._running

    # -- one pass ----------------------------------------------------------------------------------------------------

    def open_pass(self, num_wanted: Mapping[ReqId, int], is_short: bool) -> None:
        """Everything before vLLM allocates. ``num_wanted``: tokens that each running request asks for.

        ``is_short``: running requests cannot grow, or the head of the queue cannot start.
        """
        self.end_pass()
        for req_id, after_chunk in self._wrote.items():
            self.end_step(req_id, after_chunk)
        self._wrote.clear()
        self.relieve(is_short)
        self.begin_pass(num_wanted)
        for req_id, running in self._running.items():
            if running.deaths:
                self._try_recycle(req_id, running)
        self.ledger.check_packed()

    def close_pass(self, num_scheduled: Mapping[ReqId, int], num_computed: Mapping[ReqId, int]) -> None:
        """What vLLM scheduled. ``num_computed``: counts of the scheduled requests after this step."""
        for req_id, (victim, count) in self._tentative.items():
            if self.is_running(req_id) and num_scheduled.get(req_id) != 1:
                self.ledger.rollback_recycle(req_id)
                running = self._running[req_id]
                running.deaths = {victim: count, **running.deaths}
                self._uncount_recycle()
        self._tentative.clear()
        for req_id, total in num_computed.items():
            num_new = num_scheduled[req_id]
            self.ledger.sync(req_id, total)
            self._wrote[req_id] = num_new > 1 or total - num_new < self._running[req_id].prompt_len

    def finish(self, req_id: ReqId) -> None:
        """Ends a request."""
        super().finish(req_id)
        self._drop(req_id)

    def preempt(self, req_id: ReqId) -> None:
        """Drops a request's KV; it is admitted again under its trace_key when vLLM resumes it."""
        super().preempt(req_id)
        self._drop(req_id)

    def num_blocks_wanted(self, num_wanted: Mapping[ReqId, int]) -> int:
        """Blocks that the running requests would add for these tokens."""
        needed = self.ledger.num_blocks_needed
        return sum(needed(req_id, count) for req_id, count in num_wanted.items() if self.is_running(req_id))

    # -- parts -------------------------------------------------------------------------------------------------------

    def _drop(self, req_id: ReqId) -> None:
        if self._tentative.pop(req_id, None) is not None:
            self._uncount_recycle()  # preempted in the pass that was to write it
        self._wrote.pop(req_id, None)

    def _uncount_recycle(self) -> None:
        self.counters.num_recycled_tokens -= 1
        self.counters.num_evicted_tokens -= 1

    def _try_recycle(self, req_id: ReqId, running: _Running) -> None:
        if self._will_recycle(req_id, running):
            self._tentative[req_id] = next(iter(running.deaths.items()))
            self.write(req_id, 1, b"")

    def _kill(self, req_id: ReqId, running: _Running, positions: Sequence[Position]) -> None:
        """Kills what a plan can pack at once; else the victims stay doomed, due again in the next pass (DESIGN §5)."""
        if not positions or self.ledger.can_pack(req_id, positions):
            super()._kill(req_id, running, positions)
            return
        self.num_postponed += len(positions)
        self.ledger.doom(req_id, [victim for victim in positions if victim not in running.deaths])
        due = self.ledger.tables[req_id].num_computed_tokens
        postponed = {victim: due for victim in positions if victim not in running.deaths}
        running.deaths = {**postponed, **running.deaths}

    def _blocks_to_give(self, req_id: ReqId) -> int:
        table, config = self.ledger.table_view(req_id), self.requests.config(self._running[req_id].trace_key)
        return len(table.block_ids) - cdiv(config.budget_tokens(table.num_computed_tokens), table.block_size)
