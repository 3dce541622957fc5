"""The scheduler's side of one engine: drives any executor through eviction, reclamation and allocation.

One pass over the running requests, in this order:

    begin_pass(...)            deaths that are due, then plans: freed blocks serve the same pass
    write(req_id, ...)         the step's tokens: over a doomed one, or at the cursor
    end_step(req_id, ...)      the source chooses the next victims; they die at once or are doomed
    end_pass()                 the executor's step is over; fences pass
"""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise, takewhile

from vtoken.config import VTokenConfig
from vtoken.errors import PoolExhausted, SpecError
from vtoken.executor import Buffer, Executor
from vtoken.reclamation.admission import Admission, admission, count_pool
from vtoken.reclamation.manager import ReclamationManager
from vtoken.reclamation.plan import TableView
from vtoken.reclamation.recycle import recyclable
from vtoken.trace import TraceEvent
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
    num_writing: int = 0
    deaths: deque[int] = field(default_factory=deque)  # counts of the doomed tokens, in the order of the queue


class KVScheduler:
    """Applies one configuration to the requests of one executor. Holds no table of its own: it reads the executor's."""

    def __init__(
        self,
        config: VTokenConfig,
        executor: Executor,
        victims: VictimSource,
        on_event: Callable[[TraceEvent], None] | None = None,
    ) -> None:
        self.config = config
        self.executor = executor
        self.victims = victims
        self.counters = Counters()
        self.manager = ReclamationManager(config)
        self._on_event = on_event
        self._running: dict[ReqId, _Running] = {}
        self._step = 0

    # -- requests ----------------------------------------------------------------------------------------------------

    def can_admit(self, num_tokens_now: int, worst_case_tokens: int, chunk_tokens: int = 0) -> Admission:
        """Whether a request may start that writes ``num_tokens_now`` first and has ``worst_case_tokens`` live at most."""
        tables = [self.executor.table_view(req_id) for req_id in self._running]
        counters = count_pool(tables, self.executor.pool_view(), self.config)
        size = self.executor.spec.block_size
        return admission(counters, cdiv(num_tokens_now, size), cdiv(worst_case_tokens + chunk_tokens, size))

    def admit(self, req_id: ReqId, trace_key: int, prompt_len: int) -> None:
        """Starts a request. ``trace_key`` is its submission index, the same in every paired run."""
        if prompt_len < 1:
            raise SpecError(f"prompt_len={prompt_len} of request {req_id!r}: give at least 1 token")
        self.executor.admit(req_id)
        self._running[req_id] = _Running(trace_key, prompt_len)

    def finish(self, req_id: ReqId) -> None:
        """Ends a request."""
        self.executor.finish(req_id)
        self._forget(req_id)

    def preempt(self, req_id: ReqId) -> None:
        """Drops a request's KV; admit it again under the same trace_key to rebuild it."""
        self.executor.preempt(req_id)
        self._forget(req_id)
        self.counters.num_preemptions += 1

    def _forget(self, req_id: ReqId) -> None:
        self.victims.forget(self._running.pop(req_id).trace_key)
        self.manager.forget(req_id)

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
        """Writes the step's tokens. Raises PoolExhausted with nothing changed; another plan of this or any other
        request may make room.
        """
        running = self._running[req_id]
        if num_tokens != running.num_writing:
            raise SpecError(f"request {req_id!r} writes {num_tokens} tokens, begin_pass was told {running.num_writing}")
        if self._will_recycle(req_id, running):
            self.executor.recycle(req_id, kv)
            running.deaths.popleft()
            self.counters.num_recycled_tokens += 1
            self.counters.num_evicted_tokens += 1
            return
        self._kill_due(req_id, running)
        try:
            self.executor.append(req_id, num_tokens, kv)
        except PoolExhausted:
            if not any(self.reclaim(other, force=True) for other in self._running):
                raise
            self.executor.append(req_id, num_tokens, kv)

    def end_step(self, req_id: ReqId, after_chunk: bool = False) -> None:
        """Asks for victims at the new count; those that die at once are dead before the next pass."""
        running = self._running[req_id]
        self._choose(req_id, running, Occasion(running.trace_key, running.prompt_len, after_chunk=after_chunk))

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
            if pool.num_free >= self.config.pressure_high * total or self._blocks_to_give(req_id) <= 0:
                break
            running = self._running[req_id]
            self._choose(req_id, running, Occasion(running.trace_key, running.prompt_len, under_pressure=True))
            if self.reclaim(req_id, force=True):
                gave.append(req_id)
        return gave

    def _blocks_to_give(self, req_id: ReqId) -> int:
        table = self.executor.table_view(req_id)
        return len(table.block_ids) - cdiv(self.config.budget_tokens(table.num_computed_tokens), table.block_size)

    # -- parts -------------------------------------------------------------------------------------------------------

    def _will_recycle(self, req_id: ReqId, running: _Running) -> bool:
        """SPEC K-3: one token to write, one death due, a packed layout, a slot that may be written."""
        config = self.config
        if running.num_writing != 1 or not (config.variant == "vtoken" and config.mode == "eager" and config.recycle):
            return False
        table, pool = self.executor.table_view(req_id), self.executor.pool_view()
        is_packed = not self.manager.check(table, pool, self._step)
        return self._num_due(table, running) == 1 and is_packed and recyclable(table, pool) is not None

    @staticmethod
    def _num_due(table: TableView, running: _Running) -> int:
        """Doomed tokens that are dead in the step that writes ``num_writing`` tokens (SPEC K-2)."""
        end = table.num_computed_tokens + running.num_writing
        return sum(1 for _ in takewhile(lambda count: count < end, running.deaths))

    def _kill_due(self, req_id: ReqId, running: _Running) -> None:
        table = self.executor.table_view(req_id)
        num_due = self._num_due(table, running)
        if num_due:
            self._kill(req_id, table.next_doomed(num_due))
            for _ in range(num_due):
                running.deaths.popleft()

    def _kill(self, req_id: ReqId, positions: Sequence[Position]) -> None:
        if positions:
            self.counters.num_evicted_tokens += len(self.executor.kill(req_id, positions))

    def _choose(self, req_id: ReqId, running: _Running, occasion: Occasion) -> None:
        if self.config.variant == "native":
            return
        table = self.executor.table_view(req_id)
        event = self.victims.choose(table, occasion)
        if occasion.under_pressure and table.num_doomed_tokens:
            event = self._with_doomed(table, running, event, occasion.trace_key)
        if event is None:
            return
        if self._on_event:
            self._on_event(event)
        deaths = list(zip(event.died, event.chosen, strict=True))
        at_once = occasion.after_chunk or occasion.under_pressure or any(a >= b for a, b in pairwise(event.died))
        later = [(count, victim) for count, victim in deaths if count > event.at_computed or not at_once]
        self._kill(req_id, [victim for count, victim in deaths if (count, victim) not in later])
        if later:
            self.executor.doom(req_id, [victim for _, victim in later])
            running.deaths.extend(count for count, _ in later)

    @staticmethod
    def _with_doomed(table: TableView, running: _Running, event: TraceEvent | None, trace_key: int) -> TraceEvent:
        """Under pressure the doomed tokens die now, with the newly chosen ones; the trace says so."""
        victims = (*table.next_doomed(table.num_doomed_tokens), *(event.chosen if event else ()))
        running.deaths.clear()
        computed = table.num_computed_tokens
        return TraceEvent(trace_key, computed, victims, (computed,) * len(victims))
