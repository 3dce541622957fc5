"""The worker's half, the same for both of vLLM's model runners: carries a step's record out.

Positions stay logical (RoPE). Three things count live tokens instead: blocks, KV lengths, slots; the runners' own
modules see to those.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from vllm.v1.core.sched.output import SchedulerOutput

from vtoken.types import ReqId
from vtoken_torch.vllm_plugin.assembly import worker_parts
from vtoken_torch.vllm_plugin.copy_streams import Copies
from vtoken_torch.vllm_plugin.layout import MovesTokens, token_mover
from vtoken_torch.vllm_plugin.options import PluginOptions
from vtoken_torch.vllm_plugin.parts import WorkerPart
from vtoken_torch.vllm_plugin.record import ATTRIBUTE, Recycles, StepRecord

__all__ = ["WorkerSide"]

_PROMISED = ("_model_runner_output", "model_runner_output")  # the output within the promise, of runner V1 and V2


class WorkerSide:
    """Owned by a model runner as ``runner.vtoken``.

    Attributes:
        copies: carries out the moves, on the stream that the options name.
        recycles: of requests whose tokens go over dead ones, or went until nothing else was said.
        num_scheduled: tokens of each request in the step.
        changed: requests of which something was said since ``rows`` looked.
        num_moved_tokens, num_recycled_tokens: proof that both happened.
    """

    def __init__(self, runner: Any) -> None:
        self.runner = runner
        self.recycles: dict[ReqId, Recycles] = {}
        self.num_scheduled: Mapping[ReqId, int] = {}
        self.changed: set[ReqId] = set()
        self.num_recycled_tokens = 0
        self._num_evicted: dict[ReqId, int] = {}
        self._mover: MovesTokens | None = None
        options = PluginOptions.required(runner.vllm_config.additional_config)
        self.copies = Copies(options.copy_stream, runner.device, lambda: self.mover)
        self.parts: list[WorkerPart] = worker_parts(self, options)

    @property
    def mover(self) -> MovesTokens:
        """Copies and reads tokens in vLLM's cache; there is one once the cache is bound to the layers."""
        if self._mover is None:
            self._mover = token_mover(self.layers)
        return self._mover

    @property
    def layers(self) -> list[Any]:
        """The model's attention layers, whose caches hold the KV."""
        layers = self.runner.compilation_config.static_forward_context
        return [layers[name] for name in self.runner.kv_cache_config.kv_cache_groups[0].layer_names]

    @property
    def num_moved_tokens(self) -> int:
        """Tokens copied so far."""
        return 0 if self._mover is None else self._mover.num_moved_tokens

    @property
    def any_evicted(self) -> bool:
        """Whether any request has dead tokens, so that its lengths and slots differ from vLLM's."""
        return bool(self._num_evicted or self.recycles)

    @property
    def acts(self) -> bool:
        """Whether a part has something to do in the step whose moves are done."""
        return any(part.acts for part in self.parts)

    @property
    def reports(self) -> bool:
        """Whether a part has something to do after this step's forward."""
        return any(part.reports for part in self.parts)

    def begin_step(self, output: SchedulerOutput) -> StepRecord:
        """Moves first, before the runner zeroes, copies or hands out blocks that this step's plans gave back."""
        record: StepRecord = getattr(output, ATTRIBUTE)
        self.num_scheduled = output.num_scheduled_tokens
        self._forget(output)
        for part in self.parts:
            part.before_moves(record)
        self.copies.run(record)
        for part in self.parts:
            part.after_moves(record)
        if record.num_evicted:
            self._num_evicted.update(record.num_evicted)
            for req_id in record.num_evicted:
                self.recycles.pop(req_id, None)
            self.changed.update(record.num_evicted)
        if record.recycles:
            self.recycles.update(record.recycles)
            self.changed.update(record.recycles)
        return record

    def num_dead(self, req_id: ReqId) -> int:
        """Dead tokens of a request that does not recycle: packed index = position - that many."""
        return self._num_evicted.get(req_id, 0)

    def begin_forward(self, req_ids: Sequence[ReqId]) -> None:
        """The model runs next. ``req_ids``: the batch in row order."""
        for part in self.parts:
            part.before_forward(req_ids)

    def begin_sampling(self) -> None:
        """The forward pass is enqueued. What follows touches no KV, unless a part looks at it."""
        if not any(part.reports and part.reads_kv for part in self.parts):
            self.copies.forward_done()

    def end_step(self, req_ids: Sequence[ReqId], result: Any) -> None:
        """The forward pass is enqueued. ``result``: what goes back, a ``ModelRunnerOutput`` or a promise of one."""
        for name in _PROMISED:
            result = getattr(result, name, result)
        for part in self.parts:
            if part.reports:
                part.after_forward(req_ids, result)

    def _forget(self, output: SchedulerOutput) -> None:
        """Requests that are gone, or begin from nothing: their dead tokens are no more."""
        started = output.scheduled_new_reqs
        for req_ids in (
            output.finished_req_ids,
            output.preempted_req_ids,
            output.scheduled_cached_reqs.resumed_req_ids,
            started and [request.req_id for request in started],
        ):
            if not req_ids:
                continue
            for req_id in req_ids:
                self._num_evicted.pop(req_id, None)
                self.recycles.pop(req_id, None)
                self.changed.add(req_id)
            for part in self.parts:
                part.requests_left(req_ids)
