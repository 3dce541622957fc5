"""One run of synchronous requests in one pool: the scheduler's passes of an engine, without the engine."""

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from vtoken.config import VTokenConfig
from vtoken.errors import InvariantError, PoolExhausted, SpecError
from vtoken.executor import KVSpec
from vtoken.reclamation.admission import Admission, Answer
from vtoken.scheduler import Counters, KVScheduler
from vtoken.types import Position, cdiv
from vtoken.victims import VictimSource
from vtoken_bench.simulation.no_store import CapacityExecutor

__all__ = ["Engine", "Run", "Sample", "Workload"]

_PROGRESS_EVERY = 16  # passes


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests of one shape, all submitted at once, and the pool that they share (tokens, blocks)."""

    prompt: int
    output: int
    block_size: int
    pool_blocks: int
    chunk: int = 2048

    def __post_init__(self) -> None:
        for key in ("prompt", "output", "block_size", "pool_blocks", "chunk"):
            if getattr(self, key) < 1:
                raise SpecError(f"{key}={getattr(self, key)}: give at least 1")

    @property
    def total(self) -> int:
        """Tokens of one request, prompt and output."""
        return self.prompt + self.output


@dataclass(frozen=True, slots=True)
class Sample:
    """The pool after one pass, summed over requests."""

    computed_tokens: int
    held_blocks: int
    ideal_blocks: int  # sum over requests of ceil(live / block_size)


@dataclass(slots=True)
class Run:
    """What a run showed. ``refusal`` is empty if all requests ran side by side to their ends; else it says why not."""

    samples: list[Sample] = field(default_factory=list)
    copies: int = 0
    worst_step_copies: int = 0
    counters: Counters = field(default_factory=Counters)
    refusal: str = ""
    survivors: list[frozenset[Position]] = field(default_factory=list)

    @property
    def fits(self) -> bool:
        return not self.refusal

    @property
    def peak_blocks(self) -> int:
        return max((sample.held_blocks for sample in self.samples), default=0)


class Engine:
    """Iteration-level scheduling, first come first served, one prefill chunk a pass beside the decoding requests.

    A request starts when admission lets it; nobody is preempted: if the pool runs out, or a request ends before the
    last one could start, the number of requests does not fit and the run stops there.
    """

    def __init__(
        self, config: VTokenConfig, workload: Workload, victims: VictimSource, trace_keys: Iterable[int]
    ) -> None:
        keys = list(trace_keys)
        self.config, self.workload = config, workload
        self.executor = CapacityExecutor()
        self.executor.allocate(_spec(workload, len(keys)))
        self.scheduler = KVScheduler(config, self.executor, victims)
        self._waiting = deque(keys)
        self._computed: dict[int, int] = {}
        self._token = bytes(self.executor.spec.token_bytes)

    def run(self, on_progress: Callable[[float], None] | None = None) -> Run:
        """Runs all requests to their ends, or until they turn out not to fit. Reports the share that is done."""
        run = Run(counters=self.scheduler.counters)
        num_passes = self.workload.output + len(self._waiting) * cdiv(self.workload.prompt, self.workload.chunk)
        while not run.refusal and (self._waiting or self._computed):
            if on_progress and len(run.samples) % _PROGRESS_EVERY == 0:
                on_progress(len(run.samples) / num_passes)
            self._pass(run)
        pool = self.executor.pool
        if run.fits and pool.num_free != pool.num_blocks - 1:
            raise InvariantError(
                f"INV-6: all requests have ended, {pool.num_blocks - 1 - pool.num_free} blocks are gone"
            )
        return run

    def _pass(self, run: Run) -> None:
        self._admit(run)
        if run.refusal:
            return
        writing = self._writing()
        before = self.scheduler.counters.num_moved_tokens
        try:
            self._step(writing)
        except PoolExhausted as error:
            run.refusal = str(error)
            return
        self._record(run, self.scheduler.counters.num_moved_tokens - before)
        self.scheduler.end_pass()
        self._finish(run)

    def _admit(self, run: Run) -> None:
        is_prefilling = any(computed < self.workload.prompt for computed in self._computed.values())
        if not self._waiting or is_prefilling:
            return
        admission = self.admission()
        if admission.answer is Answer.ADMIT:
            key = self._waiting.popleft()
            self.scheduler.admit(str(key), key, self.workload.prompt, self.workload.total)
            self._computed[key] = 0
        elif admission.answer is Answer.NEVER_FITS or not self._computed:
            run.refusal = admission.reason

    def admission(self) -> Admission:
        """Whether one request more may start: it asks for its whole prompt, as in vLLM, or its worst case if less."""
        worst, chunk = self._worst_case()
        return self.scheduler.can_admit(min(self.workload.prompt, worst + chunk), worst, chunk)

    def _worst_case(self) -> tuple[int, int]:
        """Most tokens that a request keeps room for, and the chunk on top. ``naive`` is promised nothing back."""
        total = self.workload.total
        if self.config.variant != "vtoken":
            return total, 0
        chunk = min(self.workload.chunk, self.workload.prompt)
        return min(total - chunk, self.config.budget_tokens(total) + self.config.interval), chunk

    def _writing(self) -> dict[str, int]:
        prompt, chunk = self.workload.prompt, self.workload.chunk
        return {
            str(key): min(chunk, prompt - computed) if computed < prompt else 1
            for key, computed in self._computed.items()
        }

    def _step(self, writing: dict[str, int]) -> None:
        self.scheduler.begin_pass(writing)
        for key, computed in self._computed.items():
            count = writing[str(key)]
            self.scheduler.write(str(key), count, self._token * count)
            self._computed[key] = computed + count
            self.scheduler.end_step(str(key), after_chunk=computed < self.workload.prompt)

    def _record(self, run: Run, copies: int) -> None:
        size = self.workload.block_size
        tables = (self.executor.table_view(str(key)) for key in self._computed)
        ideal = sum(cdiv(table.num_live_tokens, size) for table in tables)
        run.samples.append(Sample(sum(self._computed.values()), self.executor.pool.num_held, ideal))
        run.copies += copies
        run.worst_step_copies = max(run.worst_step_copies, copies)

    def _finish(self, run: Run) -> None:
        for key in [key for key, computed in self._computed.items() if computed == self.workload.total]:
            if self._waiting:
                run.refusal = "a request ended before the last one could start"
            run.survivors.append(frozenset(self.executor.table_view(str(key)).live_positions()))
            self.scheduler.finish(str(key))
            del self._computed[key]


def _spec(workload: Workload, num_requests: int) -> KVSpec:
    """The smallest token there is: nothing is stored. One block more than the pool's, for the null block."""
    return KVSpec(
        num_layers=1,
        num_kv_heads=1,
        num_query_heads=1,
        head_size=1,
        dtype="bfloat16",
        block_size=workload.block_size,
        num_blocks=workload.pool_blocks + 1,
        max_num_reqs=num_requests,
    )
