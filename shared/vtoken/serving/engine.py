"""Continuous batching over the spec's scheduler side: one loop for every framework's model.

One pass, in this order:

    relieve                 evict under pressure (SPEC M-3)
    admit                   first come, first served; a request may begin with a running one's blocks
    begin_pass              deaths that are due, then plans: the store's moves come before the forward
    make room               for all rows at once: plans, pressure, fences, and at last preemption of the newest
    reserve, step           every row takes its slots, then one forward writes and attends
    end_step, end_pass      next victims; requests that have ended leave; fences pass
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from operator import attrgetter

from vtoken.config import VTokenConfig
from vtoken.errors import InvariantError, SpecError
from vtoken.executor import KVSpec
from vtoken.policies import Choice, Policy, Signal, get_policy
from vtoken.reclamation.admission import Answer
from vtoken.scheduler import Counters
from vtoken.serving.batch import Batch
from vtoken.serving.pool import RunnerPool, SlotScheduler
from vtoken.serving.protocol import ModelRunner, RanksOnDevice, SamplingParams, StepRow
from vtoken.serving.report import StepReport
from vtoken.serving.requests import Output, Progress, Request, checked_tokens
from vtoken.trace import TraceEvent, VictimTrace
from vtoken.types import Position
from vtoken.victims import PolicyVictims, TraceVictims, VictimSource

__all__ = ["ServingEngine", "StepReport"]

Prompts = Sequence[Sequence[int]]
Sampling = SamplingParams | Sequence[SamplingParams]
_GREEDY = SamplingParams()


class ServingEngine:
    """Serves token prompts through a ``ModelRunner`` under one configuration.

    Victims and deaths of a request never depend on what runs beside it, unless ``config.when`` is ``pressure``: its
    chunks end at multiples of ``chunk_tokens``, and a chunk is computed whole or waits.
    """

    def __init__(
        self,
        runner: ModelRunner,
        spec: KVSpec,
        config: VTokenConfig,
        *,
        policy: Policy | None = None,
        chunk_tokens: int = 512,
        max_num_seqs: int | None = None,
        max_model_len: int | None = None,
        vocab_size: int | None = None,
        share_prefixes: bool = True,
        replay: VictimTrace | None = None,
        on_event: Callable[[TraceEvent], None] | None = None,
        on_step: Callable[[StepReport], None] | None = None,
    ) -> None:
        """Allocates the runner's pool.

        Args:
            runner: the model.
            spec: shape of the pool; its regime is the config's.
            config: what dies, and when its memory comes back.
            policy: an object instead of the registered ``config.policy``.
            chunk_tokens: prompt tokens of one step at most; every decoding request adds one token.
            max_num_seqs: requests that run at once; the spec's ``max_num_reqs`` if None.
            max_model_len: tokens of one request (prompt and output) at most, if the model has a limit.
            vocab_size: token ids of a prompt lie below it, if it is given.
            share_prefixes: whether a request may begin with a running one's untouched blocks.
            replay: victims come from this trace, by submission index, and no policy is asked.
            on_event: takes each victim event as it is chosen.
            on_step: takes a report of each pass.
        """
        max_num_seqs = spec.max_num_reqs if max_num_seqs is None else max_num_seqs
        if not 1 <= max_num_seqs <= spec.max_num_reqs:
            raise SpecError(f"max_num_seqs={max_num_seqs}: give 1 to max_num_reqs={spec.max_num_reqs}")
        if chunk_tokens < 1:
            raise SpecError(f"chunk_tokens={chunk_tokens}: give at least 1")
        self.runner, self.config, self.on_step = runner, config, on_step
        self.max_model_len, self.vocab_size = max_model_len, vocab_size
        self.pool = RunnerPool(runner, replace(spec, regime=config.regime))
        if replay is None:
            victims: VictimSource = self._policy_victims(policy or get_policy(config.policy), on_event)
        else:
            victims = TraceVictims(replay)
        self.scheduler = SlotScheduler(config, self.pool, victims)
        self.batch = Batch(self.scheduler, self.pool, chunk_tokens, max_num_seqs, share_prefixes)
        self._num_submitted = 0

    @property
    def counters(self) -> Counters:
        """What has happened so far."""
        return self.scheduler.counters

    @property
    def is_idle(self) -> bool:
        """Whether nothing is left to do."""
        return not self.batch.waiting and not self.batch.running

    @property
    def requests(self) -> list[Request]:
        """All that run or wait, in order of submission."""
        return sorted([*self.batch.running, *self.batch.waiting], key=attrgetter("index"))

    # -- requests ----------------------------------------------------------------------------------------------------

    def generate(
        self,
        prompts: Prompts,
        sampling: Sampling = _GREEDY,
        on_progress: Callable[[Progress], None] | None = None,
    ) -> list[Output]:
        """Serves all prompts to their ends.

        Args:
            prompts: token ids.
            sampling: for all, or one for each.
            on_progress: called after each pass.

        Raises:
            SpecError: a prompt is empty or never fits; nothing was started.
        """
        requests = self._submit(prompts, sampling)
        try:
            while not all(request.finish_reason for request in requests):
                self.step()
                if on_progress:
                    on_progress(Progress.of(requests))
        finally:
            self._abort(requests)
        return [request.as_output() for request in requests]

    def stream(self, prompts: Prompts, sampling: Sampling = _GREEDY) -> Iterator[tuple[int, int]]:
        """Yields ``(index of the prompt, token id)`` as tokens are sampled; closing the iterator aborts what is left.

        Raises SpecError at the first ``next`` as ``generate`` does.
        """
        requests = self._submit(prompts, sampling)
        try:
            sent = [0] * len(requests)
            while not all(request.finish_reason for request in requests):
                self.step()
                yield from _unsent(requests, sent)
            yield from _unsent(requests, sent)  # if another caller's steps brought the last ones
        finally:
            self._abort(requests)

    def submit(self, prompt: Sequence[int], sampling: SamplingParams = _GREEDY) -> Request:
        """Queues one request; ``step`` serves it. Raises SpecError if it never fits, with nothing changed."""
        return self._submit([prompt], sampling)[0]

    def abort(self, request: Request) -> None:
        """Ends a request between two steps; a request that has ended stays as it is."""
        self._abort([request])

    def _submit(self, prompts: Prompts, sampling: Sampling) -> list[Request]:
        each = [sampling] * len(prompts) if isinstance(sampling, SamplingParams) else list(sampling)
        if len(each) != len(prompts):
            raise SpecError(
                f"{len(each)} sampling parameters for {len(prompts)} prompts: give one for all, or for each"
            )
        requests = [
            self._request(number, prompt, params)
            for number, (prompt, params) in enumerate(zip(prompts, each, strict=True))
        ]
        self._num_submitted += len(requests)
        self.batch.waiting.extend(requests)
        return requests

    def _request(self, number: int, prompt: Sequence[int], sampling: SamplingParams) -> Request:
        where = f"prompt {number}"
        token_ids = checked_tokens(where, prompt, self.vocab_size)
        total = len(token_ids) + sampling.max_tokens
        if self.max_model_len is not None and total > self.max_model_len:
            raise SpecError(
                f"{where} asks for {total} tokens in all, max_model_len is {self.max_model_len}: "
                "shorten it, or raise max_model_len"
            )
        request = Request(self._num_submitted + number, token_ids, sampling, prefill_to=len(token_ids))
        admission = self.batch.admission(request)
        if admission.answer is Answer.NEVER_FITS:
            raise SpecError(f"{where}: {admission.reason}")
        return request

    def _abort(self, requests: Sequence[Request]) -> None:
        for request in requests:
            if request.finish_reason is None:
                self.batch.end(request, "abort")

    # -- one pass ----------------------------------------------------------------------------------------------------

    def step(self) -> None:
        """One pass. If it raises, the requests that were running have ended with ``error``; the engine goes on."""
        try:
            self._step()
        except BaseException:
            for request in [*self.batch.running]:
                self.batch.end(request, "error")
            raise

    def _step(self) -> None:
        self.pool.plans.clear()
        self.scheduler.relieve()
        self.batch.admit()
        scheduled = self.batch.schedule()
        self.scheduler.begin_pass({each.req_id: each.num_next(self.batch.chunk_tokens) for each in scheduled})
        scheduled = self.batch.make_room(scheduled)
        rows = [self._row(request) for request in scheduled]
        token_ids = self.runner.step(rows) if rows else []
        self._report(scheduled, rows)
        self._take(scheduled, rows, token_ids)
        self.scheduler.end_pass()

    def _row(self, request: Request) -> StepRow:
        start, slots = request.computed, self.scheduler.reserve(request.req_id)
        request.computed += len(slots)
        return StepRow(
            row=self.pool.row_of(request.req_id),
            token_ids=request.tokens(start, request.computed),
            start=start,
            slots=slots,
            sampling=request.sampling if request.computed == request.num_known else None,
            num_sampled=len(request.output),
        )

    def _take(self, scheduled: Sequence[Request], rows: Sequence[StepRow], token_ids: Sequence[int]) -> None:
        num_sampling = sum(row.sampling is not None for row in rows)
        if len(token_ids) != num_sampling:
            raise InvariantError(f"model runner: {len(token_ids)} tokens for {num_sampling} rows that sample")
        sampled = iter(token_ids)
        for request, row in zip(scheduled, rows, strict=True):
            if row.sampling is not None:
                request.take(int(next(sampled)))
            if request.finish_reason:
                self.batch.end(request, request.finish_reason)
            else:
                self.scheduler.end_step(request.req_id, after_chunk=row.start < request.prefill_to)

    def _report(self, scheduled: Sequence[Request], rows: Sequence[StepRow]) -> None:
        if self.on_step is None:
            return
        pool = self.pool.pool
        indexed = tuple((request.index, row) for request, row in zip(scheduled, rows, strict=True))
        counts = (pool.num_held, pool.num_free, pool.num_in_flight, len(self.batch.waiting))
        self.on_step(StepReport(indexed, tuple(self.pool.plans), *counts))

    # -- victims -----------------------------------------------------------------------------------------------------

    def _policy_victims(self, policy: Policy, on_event: Callable[[TraceEvent], None] | None) -> PolicyVictims:
        if Signal.KEY_NORM in policy.signals:
            raise SpecError(f"policy {policy.name!r} needs {Signal.KEY_NORM.value}: this engine collects mass alone")
        if Signal.ATTENTION_MASS not in policy.signals or self.config.variant == "native":
            return PolicyVictims(self.config, policy, on_event=on_event)
        self.runner.collect_mass(policy.mass_need(self.config))
        lowest = partial(self._lowest, self.runner) if isinstance(self.runner, RanksOnDevice) else None
        return PolicyVictims(self.config, policy, self._scores, on_event, lowest)

    def _scores(
        self, trace_key: int, positions: Sequence[Position]
    ) -> tuple[Sequence[float], Sequence[Sequence[float]]]:
        return self.runner.scores(self.pool.row_of(str(trace_key)), positions)

    def _lowest(
        self, ranker: RanksOnDevice, trace_key: int, positions: Sequence[Position] | None, choice: Choice
    ) -> Sequence[Position]:
        return ranker.lowest(self.pool.row_of(str(trace_key)), positions, choice)


def _unsent(requests: Sequence[Request], sent: list[int]) -> Iterator[tuple[int, int]]:
    """Output tokens beyond the first ``sent`` of each request, which is brought up to date."""
    for number, request in enumerate(requests):
        while sent[number] < len(request.output):
            sent[number] += 1
            yield number, request.output[sent[number] - 1]
