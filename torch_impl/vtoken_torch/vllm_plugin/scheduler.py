"""vLLM's scheduler with the spec's scheduler side around its ``schedule()``."""

import logging
from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Self

from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

from vtoken.config import VTokenConfig
from vtoken.trace import TraceWriter, VictimTrace
from vtoken.types import ReqId
from vtoken_torch.vllm_plugin.assembly import scheduler_parts
from vtoken_torch.vllm_plugin.capacity import Capacity
from vtoken_torch.vllm_plugin.compat import check_vllm, config_refusals, raise_all, start_line, worker_class
from vtoken_torch.vllm_plugin.driver import EngineDriver
from vtoken_torch.vllm_plugin.gate import Gate
from vtoken_torch.vllm_plugin.kv_spec import EvictingManager
from vtoken_torch.vllm_plugin.lazy.driver import LazyDriver
from vtoken_torch.vllm_plugin.lazy.ledger import LazyLedger
from vtoken_torch.vllm_plugin.ledger import Ledger
from vtoken_torch.vllm_plugin.naive import NaiveLedger
from vtoken_torch.vllm_plugin.options import PluginOptions
from vtoken_torch.vllm_plugin.record import ATTRIBUTE
from vtoken_torch.vllm_plugin.requests import RequestVictims
from vtoken_torch.vllm_plugin.shortage import Shortage
from vtoken_torch.vllm_plugin.validation import check_requests

__all__ = ["VTokenScheduler"]

logger = logging.getLogger("vllm.vtoken")

_NO_EVICTION = VTokenConfig(policy="none")


@dataclass(frozen=True, slots=True)
class _Submitted:
    trace_key: int
    total_len: int


class VTokenScheduler(Scheduler):
    """Evicts before vLLM allocates, so that freed blocks serve waiting requests in the same pass.

    One name serves both kinds of scheduling: where it is asynchronous, the instance is an ``AsyncScheduler`` too.
    Counts then run one step ahead of the results, as vLLM's own do; moves keep their place, since a step's copies
    are enqueued with the step.
    """

    def __new__(cls, vllm_config: Any, *args: Any, **kwargs: Any) -> Self:
        owner = cls
        if vllm_config.scheduler_config.async_scheduling and not issubclass(cls, AsyncScheduler):
            owner = type(cls.__name__, (cls, AsyncScheduler), {})
        made: Self = super().__new__(owner)
        return made

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        check_vllm()
        super().__init__(*args, **kwargs)
        managers = self.kv_cache_manager.coordinator.single_type_managers
        raise_all(self._refusals(managers))
        (manager,) = managers
        options = PluginOptions.required(self.vllm_config.additional_config)
        options = options.of_engine(self.vllm_config.parallel_config.data_parallel_index)
        config = self.vtoken_config = options.config
        check_requests(config)
        replay = VictimTrace.load(options.replay_trace) if options.replay_trace else None
        self._open = ExitStack()
        record = None
        if options.record_trace:
            record = self._open.enter_context(TraceWriter(options.record_trace, {"engine": "vllm"})).write
        self._victims = RequestVictims(config, replay, record)
        self._drafts: dict[ReqId, int] = {}  # speculative tokens of the pass whose result is awaited
        books, driver = _books_and_driver(options)
        ledger = books(manager, self.requests, self._num_settled)
        if options.copy_stream == "own":
            ledger.fence_frees()
        ledger.pool.keeps_hashed = options.keep_prompt_cache
        self.vtoken = driver(config, ledger, self._victims)
        capacity = Capacity.of(self.vllm_config, options, ledger.pool.num_blocks)
        self.gate = Gate(self, manager, capacity, self._config_of)
        self.vtoken.least_chunk = self.gate.least_chunk
        self.shortage = Shortage(self, lead=int(isinstance(self, AsyncScheduler)))
        self._last_alone: tuple[ReqId, int] | None = None  # who was preempted with nobody beside it, at what length
        self._submitted: dict[ReqId, _Submitted] = {}
        self._num_submitted = 0
        self._failed: list[tuple[Request, str]] = []
        self.parts = scheduler_parts(self, options)
        logger.info(start_line(options, self.vllm_config, manager.block_size, ledger.pool.num_blocks))
        for warning in config.warnings:
            logger.warning("vToken: %s", warning)

    # -- vLLM's calls ------------------------------------------------------------------------------------------------

    def add_request(self, request: Request) -> None:
        """Registers the request's policy. A session that is fed piece by piece runs without eviction."""
        is_known = request.request_id in self.requests
        super().add_request(request)
        if is_known:
            return
        for part in self.parts:
            part.request_came(request.request_id)
        if not request.resumable:
            self._submit(request)
        reason = self.gate.refusal(request)
        if reason is not None:
            self.fail({request.request_id: reason})

    def _submit(self, request: Request) -> None:
        params = request.sampling_params
        key, self._num_submitted = self._num_submitted, self._num_submitted + 1
        total_len = min(request.num_prompt_tokens + (request.max_tokens or 0), self.max_model_len)
        self._submitted[request.request_id] = _Submitted(key, total_len)
        self._victims.submit(key, params.extra_args if params else None)

    def schedule(self, *args: Any, **kwargs: Any) -> SchedulerOutput:
        """One pass: deaths, plans and recycles; vLLM's own scheduling; the record for the workers."""
        num_wanted = self.shortage.num_wanted()
        self.vtoken.open_pass(num_wanted, self.shortage.is_short(num_wanted))
        for part in self.parts:
            part.pass_opened()
        output = super().schedule(*args, **kwargs)
        if not output.num_scheduled_tokens and not self.running and self.waiting:
            self._fail_the_stuck(output.preempted_req_ids or ())
        self.shortage.pass_closed(output)
        drafts = output.scheduled_spec_decode_tokens
        self._drafts = {req_id: len(tokens) for req_id, tokens in drafts.items()} if drafts else {}
        num_scheduled = _without_drafts(output)
        self.vtoken.close_pass(num_scheduled)
        self._admit_started(output, num_scheduled)
        record = self.vtoken.ledger.take_record()
        setattr(output, ATTRIBUTE, record)
        for part in self.parts:
            part.pass_closed(output, record)
        return output

    def update_from_output(self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput) -> Any:
        """vLLM's, after the parts have read what the workers report. Accepted drafts join their tables."""
        for part in self.parts:
            part.result_came(scheduler_output, model_runner_output)
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        for request, reason in self._failed:
            outputs.setdefault(request.client_index, EngineCoreOutputs()).outputs.append(_error_of(request, reason))
        self._failed.clear()
        self._drafts = {}
        return outputs

    def _get_local_prefix_cache_hit(self, request: Request) -> tuple[KVCacheBlocks, int, int, bool]:
        """As much of the hit as leaves room to start."""
        blocks, num_tokens, boundary, diverged = super()._get_local_prefix_cache_hit(request)
        return *self.gate.trimmed(request, blocks, num_tokens), boundary, diverged

    def _reserve_prefill_lookahead(self, request: Request, num_computed_tokens: int, num_new_tokens: int) -> int:
        """vLLM's last word on the size of a chunk: for a request that evicts, no more than there is room for."""
        if 0 <= num_new_tokens <= 1:
            return num_new_tokens  # a decode step: asked of every request in every step
        count = super()._reserve_prefill_lookahead(request, num_computed_tokens, num_new_tokens)
        return self.gate.chunk(request, num_computed_tokens, count)

    def _request_blocks_can_be_freed(self, request: Request) -> bool:
        """Asked of a running request before its preemption too: while blocks are in flight, vLLM waits for them."""
        is_to_be_preempted = not request.is_finished() and request in self.running
        if is_to_be_preempted and self.vtoken.ledger.pool.num_in_flight:
            return False
        return bool(super()._request_blocks_can_be_freed(request))

    def fail(self, reasons: Mapping[ReqId, str]) -> None:
        """Ends these requests with an error that their clients see (HTTP 500), and why; the others go on."""
        ended = self.finish_requests(reasons, RequestStatus.FINISHED_ERROR)
        for request in ended:
            logger.error("request %s ends with an error: %s", request.request_id, reasons[request.request_id])
        self._failed += [(request, reasons[request.request_id]) for request in ended]

    def _free_request_blocks(self, request: Request) -> None:
        """Finish, abort and preemption all pass here."""
        req_id = request.request_id
        if self.vtoken.is_running(req_id):
            for part in self.parts:
                part.request_left(req_id, request.is_finished())
            (self.vtoken.finish if request.is_finished() else self.vtoken.preempt)(req_id)
        if request.is_finished():
            self.gate.forget(req_id)
        if request.is_finished() and req_id in self._submitted:
            self._victims.finish(self._submitted.pop(req_id).trace_key)
        super()._free_request_blocks(request)

    def shutdown(self) -> None:
        """Closes what the parts and the trace hold open."""
        for part in self.parts:
            part.close()
        self._open.close()
        super().shutdown()

    # -- parts -------------------------------------------------------------------------------------------------------

    def _refusals(self, managers: Sequence[object]) -> list[str]:
        found = config_refusals(self.vllm_config)
        if len(managers) != 1:
            found.append(f"{len(managers)} KV cache groups: serve a model all of whose layers have full attention")
        elif not isinstance(managers[0], EvictingManager) and not any("worker_cls" in reason for reason in found):
            kept_by = type(managers[0]).__name__
            ours = worker_class(self.vllm_config.device_config.device_type)
            found.append(f"blocks kept by {kept_by}, which evicts nothing: set worker_cls={ours!r}")
        return found

    def _num_settled(self, req_id: ReqId) -> int:
        """Computed tokens of a request, those of the last pass included, drafts that may be refused left out."""
        count: int = self.requests[req_id].num_computed_tokens
        return count - self._drafts.get(req_id, 0) if self._drafts else count

    def _admit_started(self, output: SchedulerOutput, num_scheduled: Mapping[ReqId, int]) -> None:
        started, resumed = output.scheduled_new_reqs, output.scheduled_cached_reqs.resumed_req_ids
        if not (started or resumed):
            return
        for req_id in (*(request.req_id for request in started), *resumed):
            submitted = self._submitted.get(req_id)
            if submitted is not None and not self.vtoken.is_running(req_id):
                prompt_len = self.requests[req_id].num_prompt_tokens
                key, total_len = submitted.trace_key, submitted.total_len
                self.vtoken.admit_started(req_id, key, prompt_len, total_len, num_scheduled[req_id])

    def _config_of(self, req_id: ReqId) -> VTokenConfig:
        submitted = self._submitted.get(req_id)
        return _NO_EVICTION if submitted is None else self._victims.config(submitted.trace_key)

    def _fail_the_stuck(self, preempted: Collection[ReqId]) -> None:
        """Nothing runs and nothing was scheduled: whether the head of the queue can never go on.

        It has outgrown the pool if its policy keeps more than was to be expected, or failed altogether. Without an
        eviction it would be preempted and resumed for ever, or hold up the queue.
        """
        head = self.waiting.peek_request()
        if head.status not in (RequestStatus.WAITING, RequestStatus.PREEMPTED):
            return
        reason = self.gate.refusal(head)
        if reason is None and head.request_id in preempted:
            alone = (head.request_id, head.num_tokens)
            if self._last_alone == alone:
                num_blocks = self.gate.capacity.num_blocks
                reason = f"alone in a pool of {num_blocks} blocks it was preempted twice, without a token in between"
            self._last_alone = alone
        if reason is not None:
            self.fail({head.request_id: reason})


def _books_and_driver(options: PluginOptions) -> tuple[type[Ledger], type[EngineDriver]]:
    if options.is_lazy:
        return LazyLedger, LazyDriver
    return NaiveLedger if options.config.variant == "naive" else Ledger, EngineDriver


def _without_drafts(output: SchedulerOutput) -> Mapping[ReqId, int]:
    """The step's tokens of each request that stay, whatever the model says of its drafts."""
    num_scheduled: dict[ReqId, int] = output.num_scheduled_tokens
    drafts = output.scheduled_spec_decode_tokens
    if not drafts:
        return num_scheduled
    return {req_id: count - len(drafts.get(req_id, ())) for req_id, count in num_scheduled.items()}


def _error_of(request: Request, reason: str) -> EngineCoreOutput:
    return EngineCoreOutput(
        request_id=request.request_id,
        new_token_ids=[],
        finish_reason=request.get_finished_reason(),
        stop_reason=reason,
        events=request.take_events(),
        trace_headers=request.trace_headers,
    )
