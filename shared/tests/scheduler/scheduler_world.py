"""A serving loop over ``KVScheduler`` and the reference executor: tiny pools, chunks of 8, block size 4 by default."""

from collections.abc import Callable
from typing import Any

from vtoken.config import VTokenConfig
from vtoken.errors import PoolExhausted
from vtoken.invariants import check_launch, check_plan, check_writes
from vtoken.policies import Policy
from vtoken.scheduler import KVScheduler
from vtoken.trace import TraceEvent, VictimTrace
from vtoken.types import cdiv
from vtoken.victims import PolicyVictims, TraceVictims

MakeWorld = Callable[..., Any]
Seen = dict[str, dict[int, frozenset[int]]]
"""Live positions of a request, by its computed count, as its attention saw them in the step that reached it."""

VARIANTS: dict[str, dict[str, Any]] = {
    "eager": {},
    "eager, fill alone": {"recycle": False},
    "lazy": {"mode": "lazy", "low_watermark": 1.0, "cooldown_steps": 2},
    "naive": {"variant": "naive"},
}


def make_config(**options: Any) -> VTokenConfig:
    defaults = {"policy": "any", "kv_budget": 12, "interval": 4, "num_sinks": 2, "when": "always"}
    return VTokenConfig(**{**defaults, **options})


def trace_of(*events: TraceEvent) -> VictimTrace:
    trace = VictimTrace()
    for event in events:
        trace.add(event)
    return trace


class Engine:
    """Prefills in chunks, then writes one token a step for each request; checks what the executor is told to do."""

    def __init__(
        self,
        world: Any,
        config: VTokenConfig,
        victims: Policy | VictimTrace,
        on_event: Callable[[TraceEvent], None] | None = None,
        chunk: int = 8,
    ) -> None:
        self.world, self.config, self.chunk = world, config, chunk
        is_trace = isinstance(victims, VictimTrace)
        source = TraceVictims(victims) if is_trace else PolicyVictims(config, victims, on_event=on_event)
        self.scheduler = KVScheduler(config, world, source)
        self.seen: Seen = {}
        self.goals: dict[str, tuple[int, int, int]] = {}  # trace key, prompt length, total length
        self.rebuild_to: dict[str, int] = {}
        self.num_steps = 0
        self.preempted: set[str] = set()  # in this pass
        self.bare_launch, world.launch = world.launch, self.launch

    def launch(self, plan: Any) -> Any:
        check_plan(plan, self.world.tables[plan.req_id])
        check_launch([plan], self.world.tables)
        kept = {move.dst_slot for move in plan.moves if move.dst_slot // self.block_size not in plan.new_block_ids}
        check_writes(plan.req_id, kept, self.world.pool, self.block_size)
        return self.bare_launch(plan)

    @property
    def block_size(self) -> int:
        return self.world.spec.block_size

    def submit(self, req_id: str, prompt_len: int, num_output: int = 0) -> None:
        total = prompt_len + num_output
        self.goals[req_id] = (len(self.goals), prompt_len, total)
        self.scheduler.admit(req_id, self.goals[req_id][0], prompt_len, total)
        self.seen[req_id] = {}
        self.rebuild_to[req_id] = prompt_len

    def preempt(self, req_id: str) -> None:
        computed = self.world.tables[req_id].num_computed_tokens
        self.scheduler.preempt(req_id)
        self.scheduler.admit(req_id, *self.goals[req_id])
        self.rebuild_to[req_id] = max(computed, self.rebuild_to[req_id])
        self.preempted.add(req_id)

    def next_tokens(self) -> dict[str, int]:
        writing = {}
        for req_id, (_, _, total) in self.goals.items():
            computed, goal = self.world.tables[req_id].num_computed_tokens, self.rebuild_to[req_id]
            left = min(self.chunk, goal - computed) if computed < goal else min(1, total - computed)
            if left:
                writing[req_id] = left
        return writing

    def step(self) -> bool:
        """One pass. False once everybody is done."""
        self.num_steps += 1
        assert self.num_steps < 3000, "nobody gets on"
        writing = self.next_tokens()
        self.scheduler.begin_pass(writing)
        self.preempted.clear()
        for req_id, num_tokens in writing.items():
            table = self.world.tables[req_id]
            if req_id in self.preempted:
                continue
            is_chunk = table.num_computed_tokens < self.rebuild_to[req_id]
            try:
                self.scheduler.write(req_id, num_tokens, self.world._write(req_id, num_tokens))
            except PoolExhausted:
                if not self.world.pool.num_in_flight:
                    self.make_way()
                continue  # wait for the fence
            self.check_bound(req_id, num_tokens)
            self.seen[req_id][table.num_computed_tokens] = frozenset(table.live_positions())
            self.scheduler.end_step(req_id, after_chunk=is_chunk)
        self.scheduler.end_pass()
        return bool(writing)

    def make_way(self) -> None:
        """Nothing is free and nothing in flight."""
        raise AssertionError("the pool is exhausted")

    def check_bound(self, req_id: str, num_scheduled: int) -> None:
        """Eager mode after the write: packed, in shared + ceil((private live + scheduled) / block size) + 1 blocks."""
        if self.config.variant != "vtoken" or self.config.mode != "eager":
            return
        table, pool = self.world.tables[req_id], self.world.pool
        private = [i for i, block in enumerate(table.block_ids) if pool.is_private(block)]
        live = sum(table.live_words[i].bit_count() for i in private)
        assert table.is_packed
        assert len(private) <= cdiv(live + num_scheduled, self.block_size) + 1

    def run(self, check_every: int = 1) -> Seen:
        steps = 0
        while self.step():
            steps += 1
            if steps % check_every == 0:
                self.world.check()
        self.world.check()
        return self.seen


def run(make_world: MakeWorld, victims: Any, options: dict[str, Any], regime: str = "ordered", **engine: Any) -> Engine:
    """Two requests, 21 + 40 and 9 + 30 tokens, to their end."""
    running = Engine(make_world(regime=regime, num_blocks=33), make_config(**options), victims, **engine)
    running.submit("a", 21, 40)
    running.submit("b", 9, 30)
    running.run()
    return running
