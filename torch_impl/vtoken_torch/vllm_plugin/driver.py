"""The spec's ``Evictor``, driven by vLLM's scheduler: the same deaths, plans and pressure, around vLLM's allocation.

One pass, on vLLM's ``schedule()``:

    open_pass(...)      what the last step's tokens made due: choices, pressure, deaths, plans, recycles
    (vLLM allocates and preempts; freed blocks serve waiting requests)
    close_pass(...)     recycles that got their tokens are counted; chunks are noted

A request is touched in the passes alone in which something of it is due: a chunk was written, its policy's interval
is over (an alarm), a token dies otherwise than by the recycles that go on, or memory is short. All others cost nothing.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import takewhile

from vtoken.config import VTokenConfig
from vtoken.errors import InvariantError, SpecError
from vtoken.eviction import Evictor, Running
from vtoken.types import Position, ReqId, cdiv
from vtoken.victims import Occasion
from vtoken_torch.vllm_plugin.ledger import Ledger
from vtoken_torch.vllm_plugin.mass.orders import Question
from vtoken_torch.vllm_plugin.requests import RequestVictims

__all__ = ["EngineDriver"]


class EngineDriver(Evictor):
    """``Evictor`` for an engine that allocates by itself, and whose requests differ in policy and budget."""

    def __init__(self, config: VTokenConfig, ledger: Ledger, victims: RequestVictims) -> None:
        super().__init__(config, ledger, victims)
        self.ledger = ledger
        self.requests = victims
        self.on_broken: Callable[[ReqId, Exception], None] | None = None
        self.least_chunk: Callable[[ReqId, int], int] = lambda req_id, wanted: wanted  # of what it asks for (``Gate``)
        self.num_postponed = 0  # kills that waited for a free block to copy survivors into
        self._wrote: dict[ReqId, bool] = {}  # asked for victims in the next pass; whether after a prefill chunk
        self._asked: Mapping[ReqId, int] = {}
        self._alarms: defaultdict[int, list[ReqId]] = defaultdict(list)  # by pass: whose interval may be over then
        self._alarm_of: dict[ReqId, int] = {}
        self._mortal: dict[ReqId, Running] = {}  # with deaths to come; those that recycle are among them
        self._ends: defaultdict[int, list[tuple[ReqId, int]]] = defaultdict(list)  # by pass: recycles that may be over
        self._unpacked: set[ReqId] = set()  # killed for in this pass

    def config_of(self, running: Running) -> VTokenConfig:
        return self.requests.config(running.trace_key)

    def is_running(self, req_id: ReqId) -> bool:
        """Whether the request has a table."""
        return req_id in self._running

    def is_chunk(self, req_id: ReqId, num_new: int) -> bool:
        """Whether the last ``num_new`` tokens of a running request are no decode step: several, or of the prompt."""
        return num_new > 1 or self.ledger.count(req_id) - num_new < self._running[req_id].prompt_len

    def trace_key(self, req_id: ReqId) -> int:
        """A running request's submission index."""
        return self._running[req_id].trace_key

    # -- one pass ----------------------------------------------------------------------------------------------------

    def open_pass(self, num_wanted: Mapping[ReqId, int], is_short: bool) -> None:
        """Everything before vLLM allocates. ``num_wanted``: tokens that running requests ask for; one if left out.

        ``is_short``: running requests cannot grow, or the head of the queue cannot start.
        """
        self.end_pass()
        self._asked = num_wanted
        self._ask_for_victims()
        self.relieve(is_short)
        if self.config.variant == "naive":
            self._unpacked.update(self._running)  # a block may be given back once another follows it
        self._recycle_or_kill()
        self._reclaim_all()

    def close_pass(self, num_scheduled: Mapping[ReqId, int]) -> None:
        """What vLLM scheduled; the counts that the ledger reads are those after this step."""
        recycling = self.ledger.recycling.keys()
        if recycling:
            num_recycled = len(recycling) - len(recycling - num_scheduled.keys())
            self.counters.num_recycled_tokens += num_recycled
            self.counters.num_evicted_tokens += num_recycled
        for req_id in self._asked:
            if req_id in num_scheduled and self.is_running(req_id):
                self._note_chunk(req_id, num_scheduled[req_id])

    def admit_started(self, req_id: ReqId, trace_key: int, prompt_len: int, total_len: int, num_scheduled: int) -> None:
        """vLLM has started a request in this pass, or resumed it."""
        self.admit(req_id, trace_key, prompt_len, total_len)
        self._note_chunk(req_id, num_scheduled)

    def finish(self, req_id: ReqId) -> None:
        """Ends a request."""
        self._drop(req_id)
        super().finish(req_id)

    def preempt(self, req_id: ReqId) -> None:
        """Drops a request's KV; it is admitted again under its trace_key when vLLM resumes it."""
        self._drop(req_id)
        super().preempt(req_id)

    def reclaim(self, req_id: ReqId, force: bool = False) -> int:
        """Plans for one request if that is due; returns the blocks gained."""
        gained = 0
        with self._errors_of(req_id):
            gained += super().reclaim(req_id, force)
        return gained

    def num_blocks_wanted(self, num_wanted: Mapping[ReqId, int]) -> int:
        """Blocks that the running requests would add for these tokens, and for one where none are given."""
        needed = self.ledger.num_blocks_needed
        return sum(needed(req_id, num_wanted.get(req_id, 1)) for req_id in self._running)

    def question(self, req_id: ReqId, lead: int, is_short: bool) -> Question | None:
        """What to ask the workers about a request's mass with the step of the pass that is closed.

        Args:
            req_id: a running request.
            lead: as in ``MassFeed``.
            is_short: memory may be short in the pass that the answer is for.
        """
        running = self._running[req_id]
        may_give = is_short and self._may_give(req_id, running, lead)
        occasion = running.occasion(after_chunk=self._wrote.get(req_id, False), under_pressure=may_give)
        return self.requests.question(self.ledger.table_view(req_id), occasion, lead)

    # -- parts -------------------------------------------------------------------------------------------------------

    @contextmanager
    def _errors_of(self, req_id: ReqId) -> Iterator[None]:
        """A plan that contradicts the tables ends the engine; in verification mode its request alone."""
        try:
            yield
        except (SpecError, InvariantError) as error:
            if self.on_broken is None:
                raise
            self.on_broken(req_id, error)

    def _may_give(self, req_id: ReqId, running: Running, lead: int) -> bool:
        """Whether the request will have blocks to give, once it has a token more for each pass of ``lead``."""
        table = self.ledger.table(req_id)
        is_growing = lead > 0 and table.cursor % table.block_size == 0
        return self._blocks_to_give(req_id, running) + is_growing > 0

    def _note_chunk(self, req_id: ReqId, num_new: int) -> None:
        self._wrote[req_id] = self.is_chunk(req_id, num_new)

    def _drop(self, req_id: ReqId) -> None:
        self._wrote.pop(req_id, None)
        self._alarm_of.pop(req_id, None)
        self._mortal.pop(req_id, None)
        self._unpacked.discard(req_id)

    def _ask_for_victims(self) -> None:
        """Policies choose for requests that wrote a chunk, or whose interval may be over."""
        for req_id in self._alarms.pop(self._step, ()):
            if self._alarm_of.get(req_id) == self._step:  # else the request left, or another alarm took its place
                self._wrote.setdefault(req_id, False)
        for req_id, after_chunk in self._wrote.items():
            self.end_step(req_id, after_chunk)
            self._set_alarm(req_id)
        self._wrote.clear()

    def _set_alarm(self, req_id: ReqId) -> None:
        """For the first pass that may find the policy's interval over: a decode step writes one token."""
        running = self._running[req_id]
        due = self.requests.next_count(running.trace_key, running.must_evict)
        if due is None or self.config.variant == "native":
            self._alarm_of.pop(req_id, None)
            return
        at_pass = self._alarm_of[req_id] = self._step + max(1, due - self.ledger.count(req_id))
        self._alarms[at_pass].append(req_id)

    def _recycle_or_kill(self) -> None:
        """One step of those that have doomed tokens and do not recycle already, which in steady state is nobody."""
        recycling, mortal = self.ledger.recycling, self._mortal
        for req_id, end in self._ends.pop(self._step, ()):
            if req_id in recycling and recycling[req_id].end == end:  # else others took their place
                self._go_on_or_end(req_id, end)
        for req_id in self._asked:
            if req_id in recycling:
                self.ledger.end_recycling(req_id)
        if len(recycling) == len(mortal):
            return
        for req_id in [req_id for req_id in mortal if req_id not in recycling]:
            running = mortal[req_id]
            if running.deaths:
                self._recycle_or_kill_of(req_id, running)
            if not running.deaths:
                del mortal[req_id]

    def _go_on_or_end(self, req_id: ReqId, end: int) -> None:
        """Recycles were to be over at this count, if vLLM gave the request a token in each pass."""
        num_left = end - self.ledger.count(req_id)
        if num_left > 0:
            self._ends[self._step + num_left].append((req_id, end))
        else:
            self.ledger.end_recycling(req_id)

    def _recycle_or_kill_of(self, req_id: ReqId, running: Running) -> None:
        num_computed = self.ledger.count(req_id)
        if req_id not in self._asked and running.deaths[0][0] > num_computed:
            return
        running.num_writing = self._asked.get(req_id, 1)
        if self._can_recycle(req_id, running):
            end = self.ledger.recycle_from_here(req_id, running.deaths)
            self._ends[self._step + end - num_computed].append((req_id, end))
        else:
            self._begin(req_id, running, running.num_writing)

    def _choose(self, req_id: ReqId, running: Running, occasion: Occasion) -> None:
        if req_id in self.ledger.recycling:
            self.ledger.end_recycling(req_id)
        super()._choose(req_id, running, occasion)
        if running.deaths:
            self._mortal[req_id] = running
        else:
            self._mortal.pop(req_id, None)

    def _kill(self, req_id: ReqId, running: Running, victims: Sequence[Position]) -> None:
        """Kills what a plan can pack at once; the others stay doomed, due again in the next pass."""
        now = self.ledger.killable(req_id, victims, may_copy=self.config.when == "always" or running.must_evict)
        if now:
            self._unpacked.add(req_id)
            super()._kill(req_id, running, now)
        if len(now) < len(victims):
            gone = set(now)
            self._postpone(req_id, running, [victim for victim in victims if victim not in gone])

    def _postpone(self, req_id: ReqId, running: Running, victims: Sequence[Position]) -> None:
        running.recycles = False
        self.num_postponed += len(victims)
        table = self.ledger.table(req_id)
        self.ledger.doom(req_id, [victim for victim in victims if not table.is_doomed(victim)])
        due = table.num_computed_tokens
        running.deaths.extendleft((due, victim) for victim in reversed(victims))
        self._mortal[req_id] = running

    def _reclaim_all(self) -> None:
        """Packs those that lost tokens in this pass."""
        for req_id in self._unpacked:
            self.reclaim(req_id)
            with self._errors_of(req_id):
                self.ledger.check_packed(req_id)
        self._unpacked.clear()

    def _blocks_to_give(self, req_id: ReqId, running: Running) -> int:
        """Nothing while all that a request is to lose was postponed already."""
        self.ledger.settle(req_id)
        num_computed = self.ledger.count(req_id)
        num_live = num_computed - self.ledger.num_dead(req_id)
        num_overdue = sum(1 for _ in takewhile(lambda death: death[0] <= num_computed, running.deaths))
        budget = self.config_of(running).budget_tokens(num_computed)
        if num_live - num_overdue <= budget:
            return 0
        if self.config.variant == "naive":  # the blocks of its unmoved table are none of the pool's
            table = self.ledger.table_view(req_id)
            return len(table.block_ids) - cdiv(budget, table.block_size)
        return super()._blocks_to_give(req_id, running)
