"""Replays a recorded victim trace (SPEC K-4) through the spec's scheduler, under watch, in each variant.

The trace says which tokens died when; KV bytes are made from names, in a small shape. A request's steps follow from its
events: single tokens while victims are queued, whole chunks up to the next event otherwise.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from vtoken.config import Regime, VTokenConfig
from vtoken.errors import SpecError
from vtoken.executor import Executor, KVSpec
from vtoken.scheduler import KVScheduler
from vtoken.trace import TraceEvent, VictimTrace
from vtoken.types import ReqId, cdiv
from vtoken.victims import TraceVictims
from vtoken_conformance.bits import make_token
from vtoken_conformance.checked import CheckedExecutor
from vtoken_conformance.mismatch import compare_equal

__all__ = ["TraceJob", "TraceRun", "load_trace_jobs"]

BLOCK_SIZE = 16
MAX_CHUNK = 512
NUM_FULL_CHECKS = 256  # so many times in a run are all bytes compared

# Lazy mode is told that free blocks are always scarce: the pool is large enough for no eviction at all.
_EVERYTHING_DUE = VTokenConfig(policy="none", when="always", low_watermark=1.0, cooldown_steps=1)
_VARIANTS: dict[str, tuple[VTokenConfig, Regime]] = {
    "naive": (_EVERYTHING_DUE.with_changes(variant="naive"), "ordered"),
    "lazy": (_EVERYTHING_DUE.with_changes(mode="lazy"), "ordered"),
    "eager": (_EVERYTHING_DUE, "ordered"),
    "fenced": (_EVERYTHING_DUE.with_changes(regime="fenced"), "fenced"),
}


@dataclass(frozen=True, slots=True)
class TraceJob:
    """One trace in one variant; it runs under the name ``trace/<file>/<variant>``."""

    path: Path
    trace: VictimTrace
    variant: str

    @property
    def name(self) -> str:
        return f"trace/{self.path.stem}/{self.variant}"

    @property
    def arguments(self) -> tuple[str, ...]:
        return ("--trace", str(self.path))

    def start(self, executor: Executor) -> "TraceRun":
        return TraceRun(self, executor)


def load_trace_jobs(path: Path) -> list[TraceJob]:
    """A trace in all variants. Raises SpecError for one that is damaged, has no victims or cannot be read."""
    try:
        trace = VictimTrace.load(path)
    except OSError as error:
        raise SpecError(f"--trace {path}: {error.strerror}: name a file that a recorded run wrote") from None
    if not _with_victims(trace):
        raise SpecError(f"{path}: it holds no event with victims: record a run that evicts")
    return [TraceJob(path, trace, variant) for variant in _VARIANTS]


def _with_victims(trace: VictimTrace) -> dict[int, list[TraceEvent]]:
    """The events that choose something, by request; a request without any has nothing to replay."""
    chosen = {key: [event for event in events if event.chosen] for key, events in trace.events.items()}
    return {key: events for key, events in chosen.items() if events}


class TraceRun:
    """Runs a trace on one executor. ``step_number`` counts scheduling passes."""

    def __init__(self, job: TraceJob, executor: Executor) -> None:
        self.job = job
        self.step_number = 0
        self._events = {f"request-{key}": events for key, events in _with_victims(job.trace).items()}
        self._ends = {name: max(max(e.died) for e in events) + 1 for name, events in self._events.items()}
        num_tokens = sum(self._ends.values())
        self.executor = CheckedExecutor(executor, check_every=cdiv(num_tokens, NUM_FULL_CHECKS))

    @property
    def fingerprint_so_far(self) -> str:
        return self.executor.fingerprint_so_far

    def run(self) -> None:
        config, regime = _VARIANTS[self.job.variant]
        self.executor.allocate(self._spec(regime))
        scheduler = KVScheduler(config, self.executor, TraceVictims(self.job.trace))
        for req_id, events in self._events.items():
            scheduler.admit(req_id, events[0].trace_key, prompt_len=events[0].at_computed)
        while sizes := self._next_sizes():
            self.step_number += 1
            self._pass(scheduler, sizes)
        self.executor.verify()
        self._compare_survivors()
        for req_id in self._events:
            scheduler.finish(req_id)
        self.executor.settle()

    def step_text(self) -> str:
        if not self.step_number:
            return f"start of {self.job.variant}: allocate, admit"
        counts = {req_id: request.num_computed for req_id, request in self.executor.model.requests.items()}
        return f"pass of {self.job.variant}, call {self.executor.num_calls}, computed {counts}"

    def _pass(self, scheduler: KVScheduler, sizes: Mapping[ReqId, int]) -> None:
        scheduler.begin_pass(sizes)
        for req_id, size in sizes.items():
            start = self.executor.table_view(req_id).num_computed_tokens
            kv = b"".join(
                make_token(self.executor.spec, "random", req_id, position) for position in range(start, start + size)
            )
            scheduler.write(req_id, size, kv)
        for req_id in sizes:
            scheduler.end_step(req_id)
        scheduler.end_pass()

    def _next_sizes(self) -> dict[ReqId, int]:
        """Tokens that each unfinished request writes in the next pass."""
        sizes = {}
        for req_id, events in self._events.items():
            view = self.executor.table_view(req_id)
            computed = view.num_computed_tokens
            stop = min((e.at_computed for e in events if e.at_computed > computed), default=self._ends[req_id])
            if computed < stop:
                sizes[req_id] = 1 if view.num_doomed_tokens else min(stop - computed, MAX_CHUNK)
        return sizes

    def _compare_survivors(self) -> None:
        """K-4: whatever the variant, exactly the trace's victims are dead at the end."""
        for req_id, events in self._events.items():
            victims = {position for event in events for position in event.chosen}
            expected = sorted({*range(self._ends[req_id])} - victims)
            compare_equal("K-4", f"survivors of {req_id!r}", expected, sorted(self.executor.model.requests[req_id].kv))

    def _spec(self, regime: Regime) -> KVSpec:
        num_blocks = sum(cdiv(end, BLOCK_SIZE) + 1 for end in self._ends.values())
        return KVSpec(
            num_layers=2,
            num_kv_heads=2,
            num_query_heads=4,
            head_size=8,
            dtype="float32",
            block_size=BLOCK_SIZE,
            num_blocks=2 * num_blocks + 1,  # twice, so that lazy mode finds targets
            max_num_reqs=len(self._events),
            regime=regime,
        )
