"""The scheduler's side of one engine: drives any executor through eviction, reclamation and allocation.

One pass over the running requests, in this order:

    begin_pass(...)            deaths that are due, then plans: freed blocks serve the same pass
    write(req_id, ...)         the step's tokens: over a doomed one, or at the cursor
    end_step(req_id, ...)      the source chooses the next victims; they die at once or are doomed
    end_pass()                 the executor's step is over; fences pass
"""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice, pairwise, takewhile
from operator import itemgetter

from vtoken.config import VTokenConfig
from vtoken.errors import PoolExhausted, SpecError
from vtoken.executor import Buffer, Executor
from vtoken.reclamation.admission import Admission, admission, count_pool
from vtoken.reclamation.manager import ReclamationManager
from vtoken.reclamation.plan import TableView
from vtoken.reclamation.recycle import recyclable
from vtoken.types import Position, ReqId, cdiv
from vtoken.victims import Occasion, VictimSource

__all__ = ["Counters", "KVScheduler"]


@dataclass(slots=True)
class Counters:
    """What has happened so far: proof that eviction and reclamation run (tokens, blocks)."""

    num_evicted_tokens: int = 0
    num_recycled_tokens: int = 0
    num_moved_tokens: int = 0
    num_plans: int = 0
    num_freed_blocks: int = 0
    num_preemptions: int = 0


@dataclass(slots=True)
class _Running:
    trace_key: int
    prompt_len: int
    must_evict: bool
    num_writing: int = 0
    deaths: dict[Position, int] = field(default_factory=dict)  # counts at which the doomed tokens die, ascending

    def occasion(self, after_chunk: bool = False, under_pressure: bool = False) -> Occasion:
        return Occasion(self.trace_key, self.prompt_len, after_chunk, under_pressure, self.must_evict)


class KVScheduler:
    """Applies one configuration to the requests of one executor. Holds no table of its own: it reads the executor's."""

    def __init__(
        self,
        config: VTokenConfig,
        executor: Executor,
        victims: VictimSource,
    ) -> None:
        self.config = config
        self.executor = executor
        self.victims = victims
        self.counters = Counters()
        self.manager = ReclamationManager(config)
        self._running: dict[ReqId, _Running] = {}
        self._step = 0

    # -- requests ----------------------------------------------------------------------------------------------------

    def can_admit(self, num_tokens_now: int, worst_case_tokens: int, chunk_tokens: int = 0) -> Admission:
        """Whether a request may start that writes ``num_tokens_now`` now and has ``worst_case_tokens`` live at most."""
        tables = [self.executor.table_view(req_id) for req_id in self._running]
        counters = count_pool(tables, self.executor.pool_view(), self.config)
        size = self.executor.spec.block_size
        return admission(counters, cdiv(num_tokens_now, size), cdiv(worst_case_tokens + chunk_tokens, size))

    def admit(self, req_id: ReqId, trace_key: int, prompt_len: int, total_len: int = 0) -> None:
        """Starts a request. ``trace_key`` is its submission index, the same in every paired run.

        If ``total_len`` (prompt and output at most) exceeds the pool, it evicts whatever ``when`` says.
        """
        if prompt_len < 1:
            raise SpecError(f"prompt_len={prompt_len} of request {req_id!r}: give at least 1 token")
        self.executor.admit(req_id)
        spec = self.executor.spec
        must_evict = total_len > (spec.num_blocks - 1) * spec.block_size
        self._running[req_id] = _Running(trace_key, prompt_len, must_evict)

    def finish(self, req_id: ReqId) -> None:
        """Ends a request."""
        self.executor.finish(req_id)
        self.victims.finish(self._running.pop(req_id).trace_key)
        self.manager.forget(req_id)

    def preempt(self, req_id: ReqId) -> None:
        """Drops a request's KV; admit it again under the same trace_key to rebuild it."""
        self.executor.preempt(req_id)
        self.victims.restart(self._running.pop(req_id).trace_key)
        self.manager.forget(req_id)
        self.counters.num_preemptions += 1

    # -- one pass ----------------------------------------------------------------------------------------------------

    def begin_pass(self, num_writing: Mapping[ReqId, int]) -> None:
        """Deaths and plans of this pass. ``num_writing``: tokens that each request will write; others may be absent."""
        for req_id, running in self._running.items():
            running.num_writing = num_writing.get(req_id, 0)
            if not self._will_recycle(req_id, running):
                self._kill_due(req_id, running)
            self.reclaim(req_id)

    def reclaim(self, req_id: ReqId, force: bool = False) -> int:
        """Plans for one request if that is due; returns the blocks gained. ``force``: the pool is exhausted."""
        table, pool = self.executor.table_view(req_id), self.executor.pool_view()
        plan = self.manager.plan(table, pool, self._step, force)
        if plan is None:
            return 0
        self.executor.launch(plan)
        self.counters.num_plans += 1
        self.counters.num_moved_tokens += len(plan.moves)
        self.counters.num_freed_blocks += len(plan.freed_block_ids)
        return plan.num_blocks_gained

    def write(self, req_id: ReqId, num_tokens: int, kv: Buffer) -> None:
        """Writes the step's tokens, after plans for room if need be; raises PoolExhausted with nothing written."""
        running = self._running[req_id]
        if num_tokens != running.num_writing:
            raise SpecError(f"request {req_id!r} writes {num_tokens} tokens, begin_pass was told {running.num_writing}")
        if self._will_recycle(req_id, running):
            self.executor.recycle(req_id, kv)
            running.deaths.pop(next(iter(running.deaths)))
            self.counters.num_recycled_tokens += 1
            self.counters.num_evicted_tokens += 1
            return
        self._kill_due(req_id, running)
        try:
            self.executor.append(req_id, num_tokens, kv)
        except PoolExhausted:
            for other in self._running:
                if self.reclaim(other, force=True):
                    with suppress(PoolExhausted):
                        self.executor.append(req_id, num_tokens, kv)
                        return
            raise

    def end_step(self, req_id: ReqId, after_chunk: bool = False) -> None:
        """Asks for victims at the new count; those that die at once are dead before the next pass."""
        running = self._running[req_id]
        self._choose(req_id, running, running.occasion(after_chunk=after_chunk))

    def end_pass(self) -> None:
        """The engine's step is over: copies and forwards are done, fenced blocks come back."""
        self._step += 1
        self.executor.advance()
        self.executor.reap()

    # -- pressure ----------------------------------------------------------------------------------------------------

    def relieve(self, queue_blocked: bool = False) -> list[ReqId]:
        """SPEC M-3: evicts from the requests with the most to give until enough is free; returns those that gave."""
        pool = self.executor.pool_view()
        total = pool.num_blocks - 1
        if self.config.when != "pressure" or (pool.num_free >= self.config.pressure_low * total and not queue_blocked):
            return []
        gave: list[ReqId] = []
        for req_id in sorted(
            self._running, key=lambda name: (-self._blocks_to_give(name), self._running[name].trace_key)
        ):
            is_enough = pool.num_free + pool.num_in_flight >= self.config.pressure_high * total
            if (is_enough and (gave or not queue_blocked)) or self._blocks_to_give(req_id) <= 0:
                break
            running = self._running[req_id]
            self._choose(req_id, running, running.occasion(under_pressure=True))
            if self.reclaim(req_id, force=True):
                gave.append(req_id)
        return gave

    def _blocks_to_give(self, req_id: ReqId) -> int:
        """Private blocks beyond the budget, what the shared ones keep being counted as theirs."""
        table = self.executor.table_view(req_id)
        num_shared = len(self.executor.pool_view().not_private(table.block_ids))
        budget = self.config.budget_tokens(table.num_computed_tokens) - num_shared * table.block_size
        return len(table.block_ids) - num_shared - cdiv(max(0, budget), table.block_size)

    # -- parts -------------------------------------------------------------------------------------------------------

    def _will_recycle(self, req_id: ReqId, running: _Running) -> bool:
        """SPEC K-3: one token to write, one death due, a packed layout, a slot that may be written."""
        config = self.config
        if running.num_writing != 1 or not (config.variant == "vtoken" and config.mode == "eager" and config.recycle):
            return False
        table, pool = self.executor.table_view(req_id), self.executor.pool_view()
        if self._num_due(table, running) != 1 or self.manager.check(table, pool, self._step):
            return False
        return recyclable(table, pool) == next(iter(running.deaths))

    @staticmethod
    def _num_due(table: TableView, running: _Running) -> int:
        """Doomed tokens that are dead in the step that writes ``num_writing`` tokens (SPEC K-2)."""
        end = table.num_computed_tokens + running.num_writing
        return sum(1 for _ in takewhile(lambda count: count < end, running.deaths.values()))

    def _kill_due(self, req_id: ReqId, running: _Running) -> None:
        table = self.executor.table_view(req_id)
        num_due = self._num_due(table, running)
        if num_due:
            self._kill(req_id, running, list(islice(running.deaths, num_due)))

    def _kill(self, req_id: ReqId, running: _Running, positions: Sequence[Position]) -> None:
        if positions:
            self.counters.num_evicted_tokens += len(self.executor.kill(req_id, positions))
            for position in positions:
                running.deaths.pop(position, None)

    def _choose(self, req_id: ReqId, running: _Running, occasion: Occasion) -> None:
        if self.config.variant == "native":
            return
        event = self.victims.choose(self.executor.table_view(req_id), occasion)
        if event is None:
            return
        # A batch that dies by the schedule has one death at each count; any other dies at once as far as it is due.
        at_once = occasion.after_chunk or occasion.under_pressure or any(a >= b for a, b in pairwise(event.died))
        deaths = dict(zip(event.chosen, event.died, strict=True))
        later = {
            victim: count
            for victim, count in deaths.items()
            if victim not in running.deaths and (count > event.at_computed or not at_once)
        }
        self._kill(req_id, running, [victim for victim in deaths if victim not in later])
        if later:
            self.executor.doom(req_id, later)
            running.deaths = dict(sorted({**running.deaths, **later}.items(), key=itemgetter(1)))
