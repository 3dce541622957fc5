"""Whether memory is short, by what running requests will ask for and what the head of the queue needs to start."""

from typing import TYPE_CHECKING

from vllm.v1.core.sched.output import SchedulerOutput

from vtoken.types import ReqId

if TYPE_CHECKING:
    from vtoken_torch.vllm_plugin.scheduler import VTokenScheduler

__all__ = ["Shortage"]


class Shortage:
    """Asked by ``VTokenScheduler`` as a pass opens, and once it is closed about the next ones.

    Attributes:
        lead: passes that are opened before a pass's result is back, beyond the next one: 1 where scheduling is
            asynchronous.
    """

    def __init__(self, scheduler: "VTokenScheduler", lead: int) -> None:
        self.lead = lead
        self._scheduler = scheduler
        self._may_prefill = False  # whether a running request may ask for more than the token of a decode step

    def pass_closed(self, output: SchedulerOutput) -> None:
        """vLLM has scheduled."""
        self._may_prefill = self._is_prefilling(output)

    def num_wanted(self) -> dict[ReqId, int]:
        """Tokens that running requests will ask for, where that is not the one of a decode step.

        A chunk of what the token budget leaves, or a token and its drafts.
        """
        scheduler = self._scheduler
        if not (self._may_prefill or scheduler.num_spec_tokens):
            return {}
        left, wanted = scheduler.max_num_scheduled_tokens, {}
        for request in scheduler.running:
            if not (request.is_prefill_chunk or request.spec_token_ids):
                left -= 1
                continue
            count = request.num_tokens_with_spec + request.num_output_placeholders - request.num_computed_tokens
            wanted[request.request_id] = count = max(count if count <= 1 else min(count, left), 0)
            left -= count
        return wanted

    def is_short(self, num_wanted: dict[ReqId, int], num_taken: int = 0) -> bool:
        """Whether running requests cannot all grow, or the head of the queue cannot start for want of blocks.

        ``num_taken``: of the free ones, not to be counted.
        """
        scheduler = self._scheduler
        if scheduler.vtoken_config.when != "pressure":
            return False  # nobody asks
        pool, gate, num_running = scheduler.vtoken.ledger.pool, scheduler.gate, len(scheduler.running)
        free = pool.num_free + pool.num_in_flight - num_taken
        is_head_waiting = bool(scheduler.waiting) and num_running < scheduler.max_num_active_reqs
        if not is_head_waiting and free - gate.headroom >= num_running + self._num_filled(num_wanted):
            return False  # a block for each, and those that chunks fill
        least = {req_id: gate.least_chunk(req_id, count) for req_id, count in num_wanted.items()}
        free -= scheduler.vtoken.num_blocks_wanted(least)
        if free < gate.headroom or not is_head_waiting:
            return free < gate.headroom
        return not gate.can_start(scheduler.waiting.peek_request(), free)

    def may_come(self) -> bool:
        """Asked once a pass is closed: whether memory may be short when one opens that has its result.

        False may be wrong where a request arrives in between.
        """
        scheduler = self._scheduler
        config, pool = scheduler.vtoken_config, scheduler.vtoken.ledger.pool
        if config.when != "pressure":
            return False
        if self.lead and scheduler.waiting:
            return True  # it may be admitted by then
        num_wanted = self.num_wanted()
        num_taken = self.lead * (len(scheduler.running) + self._num_filled(num_wanted))
        if pool.num_free - num_taken < config.pressure_low * (pool.num_blocks - 1):
            return True
        return self.is_short(num_wanted, num_taken)

    def _num_filled(self, num_wanted: dict[ReqId, int]) -> int:
        return sum(num_wanted.values()) // int(self._scheduler.block_size)

    def _is_prefilling(self, output: SchedulerOutput) -> bool:
        """Whether a running request has a chunk left. Only one that this pass started, or that had one, can."""
        has_started = output.scheduled_new_reqs or output.scheduled_cached_reqs.resumed_req_ids
        is_steady = output.total_num_scheduled_tokens == len(output.num_scheduled_tokens)
        if is_steady and not (self._may_prefill or has_started):
            return False
        return any(request.is_prefill_chunk for request in self._scheduler.running)
