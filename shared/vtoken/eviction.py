"""Deaths, plans and pressure of one engine's requests, whoever allocates and writes.

One pass over the running requests, in this order:

    begin_pass(...)            deaths that are due, then plans: freed blocks serve the same pass
    (the step's tokens are written: over a doomed one, or at the cursor)
    end_step(req_id, ...)      the source chooses the next victims; they die at once or are doomed
    end_pass()                 the step is over; fences pass
"""

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import itemgetter, lt
from typing import Protocol

from vtoken.config import VTokenConfig
from vtoken.errors import SpecError
from vtoken.reclamation.manager import ReclamationManager
from vtoken.reclamation.plan import PoolView, ReclamationPlan, TableView
from vtoken.reclamation.recycle import recyclable
from vtoken.types import BlockId, Position, ReqId, cdiv
from vtoken.victims import Occasion, VictimSource

__all__ = ["Counters", "Evictor", "KVBooks", "PoolShape", "Running"]


class PoolShape(Protocol):
    """What is read of a pool's shape."""

    @property
    def block_size(self) -> int: ...
    @property
    def num_blocks(self) -> int: ...


class KVBooks(Protocol):
    """Tables and pool that an ``Evictor`` works on; every ``Executor`` is one (its docstrings hold here)."""

    @property
    def spec(self) -> PoolShape: ...
    def admit(self, req_id: ReqId) -> None: ...
    def finish(self, req_id: ReqId) -> None: ...
    def preempt(self, req_id: ReqId) -> None: ...
    def doom(self, req_id: ReqId, positions: Iterable[Position]) -> None: ...
    def kill(self, req_id: ReqId, positions: Iterable[Position]) -> list[Position]: ...
    def launch(self, plan: ReclamationPlan) -> object: ...
    def advance(self) -> None: ...
    def reap(self) -> list[BlockId]: ...
    def table_view(self, req_id: ReqId) -> TableView: ...
    def pool_view(self) -> PoolView: ...


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
class Running:
    """One request between ``admit`` and its end.

    Attributes:
        trace_key, prompt_len, must_evict: as in ``Occasion``.
        num_writing: tokens that it writes in this pass.
        recycles: its one token goes over the next doomed one (SPEC K-3); decided once a pass.
        deaths: counts at which doomed tokens die, ascending, with the token.
    """

    trace_key: int
    prompt_len: int
    must_evict: bool
    num_writing: int = 0
    recycles: bool = False
    deaths: deque[tuple[int, Position]] = field(default_factory=deque)

    def occasion(self, after_chunk: bool = False, under_pressure: bool = False) -> Occasion:
        """Why it is asked for victims now."""
        return Occasion(self.trace_key, self.prompt_len, after_chunk, under_pressure, self.must_evict)


class Evictor:
    """Applies one configuration to the requests of one engine. Holds no table of its own: it reads the books."""

    def __init__(self, config: VTokenConfig, books: KVBooks, victims: VictimSource) -> None:
        self.config = config
        self.books = books
        self.victims = victims
        self.counters = Counters()
        self.manager = ReclamationManager(config)
        self._running: dict[ReqId, Running] = {}
        self._step = 0
        self._may_recycle = config.variant == "vtoken" and config.mode == "eager" and config.recycle

    def config_of(self, running: Running) -> VTokenConfig:
        """Budget and protected tokens of one request. Override it where requests differ."""
        return self.config

    # -- requests ----------------------------------------------------------------------------------------------------

    def admit(self, req_id: ReqId, trace_key: int, prompt_len: int, total_len: int = 0) -> None:
        """Starts a request. ``trace_key`` is its submission index, the same in every paired run.

        If ``total_len`` (prompt and output at most) exceeds the pool, it evicts whatever ``when`` says.
        """
        if prompt_len < 1:
            raise SpecError(f"prompt_len={prompt_len} of request {req_id!r}: give at least 1 token")
        self.books.admit(req_id)
        self.follow(req_id, trace_key, prompt_len, total_len)

    def follow(self, req_id: ReqId, trace_key: int, prompt_len: int, total_len: int = 0) -> None:
        """``admit`` for a request that the books hold already, as one that shares a prefix."""
        spec = self.books.spec
        must_evict = total_len > (spec.num_blocks - 1) * spec.block_size
        self._running[req_id] = Running(trace_key, prompt_len, must_evict)

    def finish(self, req_id: ReqId) -> None:
        """Ends a request."""
        self.books.finish(req_id)
        self.victims.finish(self._running.pop(req_id).trace_key)
        self.manager.forget(req_id)

    def preempt(self, req_id: ReqId) -> None:
        """Drops a request's KV; admit it again under the same trace_key to rebuild it."""
        num_computed = self.books.table_view(req_id).num_computed_tokens
        self.books.preempt(req_id)
        self.victims.restart(self._running.pop(req_id).trace_key, num_computed)
        self.manager.forget(req_id)
        self.counters.num_preemptions += 1

    # -- one pass ----------------------------------------------------------------------------------------------------

    def begin_pass(self, num_writing: Mapping[ReqId, int]) -> None:
        """Deaths and plans of this pass. ``num_writing``: tokens that each request will write; others may be absent."""
        for req_id, running in self._running.items():
            self._begin(req_id, running, num_writing.get(req_id, 0))

    def reclaim(self, req_id: ReqId, force: bool = False) -> int:
        """Plans for one request if that is due; returns the blocks gained. ``force``: the pool is exhausted."""
        plan = self.manager.plan(self.books.table_view(req_id), self.books.pool_view(), self._step, force)
        if plan is None:
            return 0
        self.books.launch(plan)
        self.counters.num_plans += 1
        self.counters.num_moved_tokens += len(plan.moves)
        self.counters.num_freed_blocks += len(plan.freed_block_ids)
        return plan.num_blocks_gained

    def end_step(self, req_id: ReqId, after_chunk: bool = False) -> None:
        """Asks for victims at the new count; those that die at once are dead before the next pass."""
        running = self._running[req_id]
        self._choose(req_id, running, running.occasion(after_chunk=after_chunk))

    def end_pass(self) -> None:
        """The engine's step is over: copies and forwards are done, fenced blocks come back."""
        self._step += 1
        self.books.advance()
        self.books.reap()

    # -- pressure ----------------------------------------------------------------------------------------------------

    def relieve(self, queue_blocked: bool = False) -> list[ReqId]:
        """SPEC M-3: evicts from the requests with the most to give until enough is free; returns those that gave."""
        if self.config.when != "pressure":
            return []
        pool = self.books.pool_view()
        total = pool.num_blocks - 1
        if pool.num_free >= self.config.pressure_low * total and not queue_blocked:
            return []
        gave: list[ReqId] = []
        offers = [
            (-self._blocks_to_give(req_id, each), each.trace_key, req_id) for req_id, each in self._running.items()
        ]
        for offer, _, req_id in sorted(offers):
            is_enough = pool.num_free + pool.num_in_flight >= self.config.pressure_high * total
            if (is_enough and (gave or not queue_blocked)) or offer >= 0:
                break
            running = self._running[req_id]
            self._choose(req_id, running, running.occasion(under_pressure=True))
            if self.reclaim(req_id, force=True):
                gave.append(req_id)
        return gave

    def _blocks_to_give(self, req_id: ReqId, running: Running) -> int:
        """Private blocks beyond what the request keeps, what the shared ones keep being counted as theirs.

        It keeps its budget, and what no policy may choose if that is more.
        """
        table, config = self.books.table_view(req_id), self.config_of(running)
        num_computed, num_shared = table.num_computed_tokens, len(self.books.pool_view().not_private(table.block_ids))
        kept = max(config.budget_tokens(num_computed), config.kept_tokens(num_computed, running.prompt_len))
        kept_private = max(0, kept - num_shared * table.block_size)
        return len(table.block_ids) - num_shared - cdiv(kept_private, table.block_size)

    # -- parts -------------------------------------------------------------------------------------------------------

    def _begin(self, req_id: ReqId, running: Running, num_writing: int) -> None:
        running.num_writing = num_writing
        running.recycles = self._can_recycle(req_id, running)
        if not running.recycles:
            self._kill_due(req_id, running)
        self.reclaim(req_id)

    def _can_recycle(self, req_id: ReqId, running: Running) -> bool:
        """SPEC K-3: one token to write, one death due, a packed layout, a slot that may be written."""
        deaths = running.deaths
        if running.num_writing != 1 or not deaths or not self._may_recycle:
            return False
        table, pool = self.books.table_view(req_id), self.books.pool_view()
        num_computed = table.num_computed_tokens
        if deaths[0][0] > num_computed or (len(deaths) > 1 and deaths[1][0] <= num_computed):
            return False
        return not self.manager.check(table, pool, self._step) and recyclable(table, pool) == deaths[0][1]

    def _kill_due(self, req_id: ReqId, running: Running) -> None:
        """Kills the doomed tokens that are dead in the step that writes ``num_writing`` tokens (SPEC K-2)."""
        deaths = running.deaths
        if not deaths:
            return
        end = self.books.table_view(req_id).num_computed_tokens + running.num_writing
        victims = []
        while deaths and deaths[0][0] < end:
            victims.append(deaths.popleft()[1])
        if victims:
            self._kill(req_id, running, victims)

    def _kill(self, req_id: ReqId, running: Running, victims: Sequence[Position]) -> None:
        """Kills at once tokens that are in no schedule (any more)."""
        running.recycles = False
        self.counters.num_evicted_tokens += len(self.books.kill(req_id, victims))

    def _choose(self, req_id: ReqId, running: Running, occasion: Occasion) -> None:
        if self.config.variant == "native":
            return
        event = self.victims.choose(self.books.table_view(req_id), occasion)
        if event is None:
            return
        chosen, died, deaths = event.chosen, event.died, running.deaths
        # A batch that dies by the schedule has one death at each count; any other dies at once as far as it is due.
        by_schedule = not (occasion.after_chunk or occasion.under_pressure) and all(map(lt, died, died[1:]))
        if by_schedule and not deaths:
            self.books.doom(req_id, chosen)
            deaths.extend(zip(died, chosen, strict=True))
            return
        queued = {victim for _, victim in deaths}
        later = [
            (count, victim)
            for count, victim in zip(died, chosen, strict=True)
            if victim not in queued and (by_schedule or count > event.at_computed)
        ]
        kept = {victim for _, victim in later}
        at_once = [victim for victim in chosen if victim not in kept]
        if at_once:
            gone = set(at_once)
            running.deaths = deque(death for death in deaths if death[1] not in gone)
            self._kill(req_id, running, at_once)
        if later:
            self.books.doom(req_id, [victim for _, victim in later])
            running.deaths = deque(sorted([*running.deaths, *later], key=itemgetter(0)))
