"""vLLM's scheduler with the spec's scheduler side around its ``schedule()`` (DESIGN §7)."""

import logging
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request

from vtoken.trace import TraceWriter, VictimTrace
from vtoken.types import ReqId, cdiv
from vtoken_torch.vllm_plugin.compat import check_vllm, config_refusals, raise_all, start_line
from vtoken_torch.vllm_plugin.driver import EngineDriver
from vtoken_torch.vllm_plugin.kv_spec import EvictingManager
from vtoken_torch.vllm_plugin.ledger import Ledger
from vtoken_torch.vllm_plugin.naive import NaiveLedger
from vtoken_torch.vllm_plugin.options import PluginOptions
from vtoken_torch.vllm_plugin.record import ATTRIBUTE
from vtoken_torch.vllm_plugin.requests import RequestVictims
from vtoken_torch.vllm_plugin.validation import check_requests

__all__ = ["VTokenScheduler"]

logger = logging.getLogger("vllm.vtoken")


@dataclass(frozen=True, slots=True)
class _Submitted:
    trace_key: int
    total_len: int


class VTokenScheduler(Scheduler):
    """Evicts before vLLM allocates, so that freed blocks serve waiting requests in the same pass."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        check_vllm()
        super().__init__(*args, **kwargs)
        managers = self.kv_cache_manager.coordinator.single_type_managers
        raise_all(self._refusals(managers))
        (manager,) = managers
        options = PluginOptions.required(self.vllm_config.additional_config)
        config = self.vtoken_config = options.config
        check_requests(config)
        replay = VictimTrace.load(options.replay_trace) if options.replay_trace else None
        self._open = ExitStack()
        record = None
        if options.record_trace:
            record = self._open.enter_context(TraceWriter(options.record_trace, {"engine": "vllm"})).write
        self._victims = RequestVictims(config, replay, record)
        ledger = NaiveLedger(manager) if config.variant == "naive" else Ledger(manager)
        self.vtoken = EngineDriver(config, ledger, self._victims)
        if config.variant == "vtoken":
            manager.live_bound = self._live_bound
        self._submitted: dict[ReqId, _Submitted] = {}
        self._num_submitted = 0
        caching = bool(self.cache_config.enable_prefix_caching)
        logger.info(start_line(config, manager.block_size, ledger.pool.num_blocks, caching))
        for warning in config.warnings:
            logger.warning("vToken: %s", warning)

    # -- vLLM's calls ------------------------------------------------------------------------------------------------

    def add_request(self, request: Request) -> None:
        """Registers the request's policy. A session that is fed piece by piece runs without eviction."""
        is_known = request.request_id in self.requests
        super().add_request(request)
        if is_known or request.resumable:
            return
        params = request.sampling_params
        key, self._num_submitted = self._num_submitted, self._num_submitted + 1
        total_len = min(request.num_prompt_tokens + (request.max_tokens or 0), self.max_model_len)
        self._submitted[request.request_id] = _Submitted(key, total_len)
        self._victims.submit(key, params.extra_args if params else None)

    def schedule(self, *args: Any, **kwargs: Any) -> SchedulerOutput:
        """One pass: deaths, plans and tentative recycles; vLLM's own scheduling; the record for the workers."""
        num_wanted = self._num_wanted()
        self.vtoken.open_pass(num_wanted, self._is_short(num_wanted))
        output = super().schedule(*args, **kwargs)
        num_scheduled = output.num_scheduled_tokens
        for req_id in num_scheduled:
            if req_id in self._submitted and not self.vtoken.is_running(req_id):
                submitted = self._submitted[req_id]
                prompt_len = self.requests[req_id].num_prompt_tokens
                self.vtoken.admit(req_id, submitted.trace_key, prompt_len, submitted.total_len)
        tracked = {
            req_id: self.requests[req_id].num_computed_tokens for req_id in num_scheduled if req_id in self._submitted
        }
        self.vtoken.close_pass(num_scheduled, tracked)
        setattr(output, ATTRIBUTE, self.vtoken.ledger.take_record())
        return output

    def _free_request_blocks(self, request: Request) -> None:
        """Finish, abort and preemption all pass here."""
        req_id = request.request_id
        if self.vtoken.is_running(req_id):
            (self.vtoken.finish if request.is_finished() else self.vtoken.preempt)(req_id)
        if request.is_finished() and req_id in self._submitted:
            self._victims.finish(self._submitted.pop(req_id).trace_key)
        super()._free_request_blocks(request)

    def shutdown(self) -> None:
        """Closes the trace."""
        self._open.close()
        super().shutdown()

    # -- parts -------------------------------------------------------------------------------------------------------

    def _refusals(self, managers: Sequence[object]) -> list[str]:
        found = config_refusals(self.vllm_config)
        if len(managers) != 1:
            found.append(f"{len(managers)} KV cache groups: only models with full attention alone can be evicted")
        elif not isinstance(managers[0], EvictingManager) and not any("worker_cls" in reason for reason in found):
            found.append(f"blocks kept by {type(managers[0]).__name__}: the workers gave no evictable KV cache spec")
        return found

    def _num_wanted(self) -> dict[ReqId, int]:
        """Tokens that running requests will ask for: one in decode, a chunk of what the token budget leaves."""
        budget, wanted = self.max_num_scheduled_tokens, {}
        for request in self.running:
            count = request.num_tokens_with_spec + request.num_output_placeholders - request.num_computed_tokens
            count = max(count if count <= 1 else min(count, budget), 0)
            wanted[request.request_id] = count
            budget = max(budget - count, 0)
        return wanted

    def _is_short(self, num_wanted: dict[ReqId, int]) -> bool:
        """Whether running requests cannot all grow, or the head of the queue cannot start for want of blocks."""
        free = self.vtoken.ledger.pool.num_free - self.vtoken.num_blocks_wanted(num_wanted)
        if free < 0 or not self.waiting or len(self.running) >= self.max_num_active_reqs:
            return free < 0
        head = self.waiting.peek_request()
        needed = cdiv(head.num_tokens, self.block_size)
        if needed <= free:
            return False
        hit, _, _ = self.kv_cache_manager.get_computed_blocks(head)
        return bool(needed - sum(block.ref_cnt > 0 for block in hit.blocks[0]) > free)

    def _live_bound(self, req_id: ReqId, num_tokens: int) -> int:
        """Most tokens that a request has live at once on its way to ``num_tokens``: budget, interval, a chunk."""
        if req_id not in self._submitted:
            return num_tokens
        config = self._victims.config(self._submitted[req_id].trace_key)
        protected = (
            ((0, self.requests[req_id].num_prompt_tokens),) if config.protected == "prompt" else config.protected
        )
        kept = config.num_sinks + (config.recent or 0) + sum(end - start for start, end in protected)
        chunk = min(int(self.max_num_scheduled_tokens), num_tokens)
        return max(config.budget_tokens(num_tokens), kept) + config.interval + chunk
