"""The scheduler's side over the reference executor: tiny pools, chunks of 8, block size 4 unless said otherwise."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vtoken.config import VTokenConfig
from vtoken.errors import PoolExhausted, SpecError
from vtoken.invariants import check_launch, check_plan, check_writes
from vtoken.policies import Policy, RequestView
from vtoken.policies.random import RandomPolicy
from vtoken.policies.streaming_llm import StreamingLLMPolicy
from vtoken.reclamation.admission import Answer
from vtoken.scheduler import KVScheduler
from vtoken.trace import TraceEvent, VictimTrace
from vtoken.types import Position, cdiv
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


@pytest.fixture(scope="module")
def recorded(make_world: MakeWorld) -> tuple[VictimTrace, Seen]:
    """The trace of a random policy, and what its own run saw."""
    trace = VictimTrace()
    return trace, run(make_world, RandomPolicy(), {}, on_event=trace.add).seen


# -- one trace, all variants (K) -------------------------------------------------------------------------------------


@pytest.mark.parametrize("regime", ["ordered", "fenced"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_on_one_trace_every_variant_sees_the_same_live_tokens_at_every_count(
    make_world: MakeWorld, recorded: tuple[VictimTrace, Seen], variant: str, regime: str
) -> None:
    trace, seen = recorded
    engine = run(make_world, trace, VARIANTS[variant], regime)
    assert engine.seen == seen
    deaths = [(key, count) for key, events in trace.events.items() for event in events for count in event.died]
    assert engine.scheduler.counters.num_evicted_tokens == sum(count < (61, 39)[key] for key, count in deaths)


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_variant_records_the_same_trace(
    make_world: MakeWorld, recorded: tuple[VictimTrace, Seen], variant: str
) -> None:
    trace = VictimTrace()
    run(make_world, RandomPolicy(), VARIANTS[variant], on_event=trace.add)
    assert trace.events == recorded[0].events


def test_the_native_variant_evicts_nobody(make_world: MakeWorld, recorded: tuple[VictimTrace, Seen]) -> None:
    engine = run(make_world, recorded[0], {"variant": "native"})
    assert all(live == frozenset(range(count)) for seen in engine.seen.values() for count, live in seen.items())
    counters = engine.scheduler.counters
    assert (counters.num_evicted_tokens, counters.num_plans, counters.num_freed_blocks) == (0, 0, 0)


def test_a_trace_is_replayed_in_chunks_of_another_size(
    make_world: MakeWorld, recorded: tuple[VictimTrace, Seen]
) -> None:
    trace, seen = recorded
    for chunk in (5, 16, 32):
        replayed = run(make_world, trace, {}, chunk=chunk).seen
        assert all(replayed["a"][count] == seen["a"][count] for count in range(22, 62))
        assert all(replayed["b"][count] == seen["b"][count] for count in range(10, 40))


def test_live_tokens_never_exceed_budget_and_interval_in_decode(recorded: tuple[VictimTrace, Seen]) -> None:
    _, seen = recorded
    decode = [
        len(live)
        for req_id, prompt_len in (("a", 21), ("b", 9))
        for count, live in seen[req_id].items()
        if count > prompt_len
    ]
    assert max(decode) == 12 + 4


def test_a_victim_is_invisible_in_the_very_step_that_writes_its_position(make_world: MakeWorld) -> None:
    trace = trace_of(TraceEvent(0, 8, (2, 3, 5), (8, 9, 10)))
    for options in VARIANTS.values():
        engine = Engine(make_world(), make_config(**options), trace)
        engine.submit("a", 8, 4)
        seen = engine.run()["a"]
        gone = [sorted(set(range(count)) - seen[count]) for count in (8, 9, 10, 11, 12)]
        assert gone == [[], [2], [2, 3], [2, 3, 5], [2, 3, 5]]


def test_a_batch_larger_than_the_interval_is_dead_before_the_next_pass(make_world: MakeWorld) -> None:
    for died, num_live in (((8, 9, 10), 8), ((8, 8, 8), 5)):
        engine = Engine(make_world(), make_config(), trace_of(TraceEvent(0, 8, (1, 2, 3), died)), chunk=7)
        engine.submit("a", 7, 2)
        engine.step()
        engine.step()
        table = engine.world.tables["a"]
        assert (table.num_computed_tokens, table.num_live_tokens) == (8, num_live)
        engine.run()


def test_a_step_that_writes_q_tokens_ends_the_first_q_doomed_tokens(make_world: MakeWorld) -> None:
    trace = trace_of(TraceEvent(0, 8, (2, 3, 5, 6), (8, 9, 10, 11)))
    engine = Engine(make_world(), make_config(), trace)
    engine.submit("a", 8, 8)
    engine.step()
    engine.rebuild_to["a"] = 11  # three tokens at once, as a second turn of a chat writes them
    engine.step()
    assert engine.seen["a"][11] == frozenset({0, 1, 4, 6, *range(7, 11)})
    assert engine.world.tables["a"].next_doomed(9) == [6]
    engine.run()


def test_a_step_of_several_tokens_recycles_nothing(make_world: MakeWorld) -> None:
    engine = Engine(make_world(), make_config(), trace_of(TraceEvent(0, 9, (2, 3), (9, 14))))
    engine.submit("a", 8, 10)
    engine.step()
    engine.step()
    engine.rebuild_to["a"] = 12
    engine.step()
    assert engine.seen["a"][12] == frozenset(range(12)) - {2}
    assert engine.scheduler.counters.num_recycled_tokens == 0
    engine.run()
    assert engine.scheduler.counters.num_recycled_tokens == 1


def test_deaths_of_batches_that_overlap_come_in_the_order_of_their_counts(make_world: MakeWorld) -> None:
    trace = trace_of(TraceEvent(0, 8, (1, 2), (10, 14)), TraceEvent(0, 9, (3, 4), (11, 12)))
    for options in VARIANTS.values():
        engine = Engine(make_world(), make_config(**options), trace)
        engine.submit("a", 8, 8)
        seen = engine.run()["a"]
        deaths = {count - 1: seen[count - 1] - seen[count] for count in range(9, 17) if seen[count - 1] - seen[count]}
        assert deaths == {10: {1}, 11: {3}, 12: {4}, 14: {2}}


@pytest.mark.parametrize("chosen", [(3,), (3, 4)])
def test_a_later_event_brings_the_death_of_a_doomed_token_forward(
    make_world: MakeWorld, chosen: tuple[int, ...]
) -> None:
    """As pressure does: the token is killed once, and no other dies in its place when its old count comes."""
    trace = trace_of(
        TraceEvent(0, 8, (2, 3), (8, 9)),
        TraceEvent(0, 9, chosen, (9,) * len(chosen)),
        TraceEvent(0, 12, (5, 6), (12, 13)),
    )
    for options in VARIANTS.values():
        engine = Engine(make_world(), make_config(**options), trace)
        engine.submit("a", 8, 8)
        seen = engine.run()["a"]
        assert sorted(set(range(12)) - seen[12]) == sorted({2, *chosen})
        assert sorted(set(range(13)) - seen[13]) == sorted({2, *chosen, 5})
        assert engine.scheduler.counters.num_evicted_tokens == 3 + len(chosen)


# -- eager mode ------------------------------------------------------------------------------------------------------


def test_recycling_under_a_fixed_budget_never_copies(make_world: MakeWorld) -> None:
    for regime in ("ordered", "fenced"):
        engine = Engine(make_world(regime=regime), make_config(), RandomPolicy())
        engine.submit("a", 24, 60)
        while engine.world.tables["a"].num_computed_tokens < 24:
            engine.step()
        engine.step()  # what follows the last chunk is packed here
        after_prefill = engine.scheduler.counters.num_moved_tokens
        engine.run()
        counters = engine.scheduler.counters
        assert counters.num_moved_tokens == after_prefill
        assert counters.num_recycled_tokens > 50


@pytest.mark.parametrize("regime", ["ordered", "fenced"])
def test_a_layout_is_packed_in_every_step_though_a_batch_dies_beside_a_doomed_token(
    make_world: MakeWorld, regime: str
) -> None:
    """Were the doomed token left to recycle, the plan for the batch would be in flight when it is its turn."""
    trace = trace_of(TraceEvent(0, 10, (7, 8, 9), (10, 11, 12)), TraceEvent(0, 11, (1, 2, 3), (11, 11, 11)))
    for options in ({}, {"recycle": False}):
        engine = Engine(make_world(regime=regime), make_config(**options), trace)
        engine.submit("a", 8, 10)
        engine.run()  # every step checks that the layout is packed
        assert engine.scheduler.counters.num_evicted_tokens == 6


def test_held_blocks_stay_within_the_bound_at_every_step_of_a_long_decode(make_world: MakeWorld) -> None:
    """Prompt 100, 1500 steps, block size 16, budget 256, interval 64: 21 blocks suffice, and every step has them."""
    for options in ({}, {"recycle": False}):
        world = make_world(block_size=16, num_blocks=120, num_layers=1, num_kv_heads=1)
        engine = Engine(
            world, make_config(kv_budget=256, interval=64, num_sinks=4, **options), RandomPolicy(), chunk=64
        )
        engine.submit("a", 100, 1500)
        held = []
        while engine.step():
            held.append(len(world.tables["a"].block_ids))
        world.check()
        assert len(held) == 2 + 1500
        assert max(held) <= cdiv(256 + 64, 16) + 1
        assert world.tables["a"].num_computed_tokens == 1600
        assert world.tables["a"].num_live_tokens <= 256 + 64


def test_blocks_come_back_to_the_pool_as_tokens_die(make_world: MakeWorld) -> None:
    engine = Engine(make_world(num_blocks=17), make_config(kv_budget=8), StreamingLLMPolicy())
    engine.submit("a", 48)
    free = []
    while engine.step():
        free.append(engine.world.pool.num_free)
    engine.scheduler.begin_pass({})
    free.append(engine.world.pool.num_free)
    assert free == [14, 12, 12, 12, 12, 12, 14]  # 8 live after each chunk, 8 more to write


def test_a_doomed_token_in_a_shared_block_dies_on_time_and_the_other_holder_keeps_it(make_world: MakeWorld) -> None:
    world = make_world()
    engine = Engine(world, make_config(), trace_of(TraceEvent(0, 10, (2, 3, 5), (10, 11, 12))))
    engine.submit("a", 8, 7)
    for _ in range(3):
        engine.step()
    world.fork_prefix("a", "b", 8)
    before = world.observe().requests["b"]
    seen = engine.run()["a"]
    assert [sorted(set(range(count)) - seen[count]) for count in (11, 12, 13)] == [[2], [2, 3], [2, 3, 5]]
    assert engine.scheduler.counters.num_recycled_tokens == 1  # 3 alone: copied out of its shared block by then
    assert world.observe().requests["b"] == before


def test_an_append_asks_for_a_block_only_where_neither_hole_nor_room_is_left(make_world: MakeWorld) -> None:
    world = make_world(num_blocks=3)
    engine = Engine(world, make_config(), trace_of(TraceEvent(0, 8, (1,), (8,)), TraceEvent(0, 9, (), ())))
    engine.submit("a", 8, 2)
    engine.step()
    assert world.pool.num_free == 0
    engine.step()  # full blocks, one victim: recycled, no block needed
    with pytest.raises(AssertionError, match="the pool is exhausted"):
        engine.step()  # full blocks, no victim


# -- shared prefixes -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", VARIANTS.values(), ids=VARIANTS)
def test_requests_on_one_prefix_keep_the_bound_and_their_bytes(make_world: MakeWorld, options: dict[str, Any]) -> None:
    world = make_world(num_blocks=65)
    engine = Engine(world, make_config(kv_budget=16, **options), RandomPolicy())
    engine.submit("a", 24, 40)
    for _ in range(2):
        engine.step()
    admit = world.admit
    world.admit = lambda req_id: world.fork_prefix("parent", req_id, 16)  # a prefix cache would do this
    admit("parent")
    world.grow("parent", 16)
    for index in range(4):
        engine.submit(f"c{index}", 20 + index, 40)
    engine.run()
    assert world.observe().requests["parent"].positions == tuple(range(16))
    assert all(table.num_live_tokens <= 16 + 4 for req_id, table in world.tables.items() if req_id != "parent")


# -- preemption (K-4, Q-4) -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("source", ["policy", "trace"])
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("regime", ["ordered", "fenced"])
def test_a_preempted_request_sees_what_it_would_have_seen(
    make_world: MakeWorld, recorded: tuple[VictimTrace, Seen], variant: str, regime: str, source: str
) -> None:
    trace, seen = recorded
    for stops in ([3], [13], [28], [40], [13, 17, 41]):
        events: list[TraceEvent] = []
        victims = RandomPolicy() if source == "policy" else trace
        engine = Engine(
            make_world(regime=regime, num_blocks=33), make_config(**VARIANTS[variant]), victims, events.append
        )
        engine.submit("a", 21, 40)
        engine.submit("b", 9, 30)
        steps = 0
        while engine.step():
            steps += 1
            if steps in stops:
                engine.seen["a"].clear()
                engine.preempt("a")
                engine.world.check()
        rebuilt = max(engine.rebuild_to["a"], 21)
        assert engine.seen["b"] == seen["b"]
        assert all(engine.seen["a"][count] == seen["a"][count] for count in range(rebuilt + 1, 62))
        assert engine.scheduler.counters.num_preemptions == len(stops)
        if source == "policy":
            assert [event for event in events if event.trace_key == 0] == trace.events[0]


def test_a_request_preempted_with_a_copy_in_flight_gives_every_block_back(make_world: MakeWorld) -> None:
    for end in ("preempt", "finish"):
        world = make_world(regime="fenced")
        engine = Engine(world, make_config(), RandomPolicy())
        engine.submit("a", 21, 40)
        for _ in range(2):
            engine.step()
        engine.scheduler.begin_pass({"a": 5})
        assert world.tables["a"].plan_in_flight
        getattr(engine.scheduler, end)("a")
        world.check()
        assert world.pool.num_in_flight > 0
        engine.scheduler.end_pass()
        assert (world.pool.num_free, world.pool.num_in_flight) == (16, 0)


# -- an exhausted pool (Q-5) -----------------------------------------------------------------------------------------


def test_a_write_that_finds_no_room_changes_nothing_and_can_be_tried_again(make_world: MakeWorld) -> None:
    world = make_world(num_blocks=5)
    engine = Engine(world, make_config(policy="none", kv_budget=None), trace_of())
    engine.submit("a", 8)
    engine.submit("b", 8, 1)
    engine.step()
    engine.scheduler.begin_pass({"b": 1})
    before = (world.observe(), world.pool.free_block_ids())
    kv = world._write("b", 1)
    with pytest.raises(PoolExhausted, match="1 blocks are needed, 0 of 4 are free"):
        engine.scheduler.write("b", 1, kv)
    assert (world.observe(), world.pool.free_block_ids()) == before
    engine.scheduler.finish("a")
    engine.scheduler.write("b", 1, kv)
    world.check()


def test_lazy_plans_of_several_requests_make_room_for_a_chunk(make_world: MakeWorld) -> None:
    """No watermark is reached, but the pool is full: one plan after the other is forced until the chunk fits."""
    world = make_world(num_blocks=10)
    config = make_config(policy="none", kv_budget=None, mode="lazy", low_watermark=0.0, theta_fragmentation=0.0)
    engine = Engine(world, config, trace_of())
    for req_id in ("a", "b", "c"):
        engine.submit(req_id, 8, 8)
    world.kill("a", [])
    engine.step()
    for req_id in ("a", "b"):
        world.grow(req_id, 1)  # a tail beside the blocks that die
        world.kill(req_id, [0, 1, 2, 3])
    world.grow("c", 4)
    assert world.pool.num_free == 0
    engine.scheduler.begin_pass({"c": 8})
    engine.scheduler.write("c", 8, world._write("c", 8))
    assert engine.scheduler.counters.num_plans == 2
    world.check()


def test_a_full_pool_of_fenced_blocks_waits_for_the_fence(make_world: MakeWorld) -> None:
    world = make_world(num_blocks=5, regime="fenced")
    trace = trace_of(TraceEvent(0, 16, tuple(range(12)), (16,) * 12))
    engine = Engine(world, make_config(), trace, chunk=16)
    engine.submit("a", 16, 1)
    engine.step()
    engine.scheduler.begin_pass({"a": 1})
    assert (world.pool.num_free, world.pool.num_in_flight) == (0, 3)
    with pytest.raises(PoolExhausted, match="3 in flight"):
        engine.scheduler.write("a", 1, world._write("a", 1))
    engine.scheduler.end_pass()
    engine.run()
    assert engine.scheduler.counters.num_preemptions == 0


# -- pressure (M-3, M-5) ---------------------------------------------------------------------------------------------


def pressed_engine(world: Any, **options: Any) -> Engine:
    """Three requests of 16, 40 and 24 tokens over a budget of 8, in a pool of 20 blocks."""
    engine = Engine(world, make_config(when="pressure", kv_budget=8, **options), StreamingLLMPolicy(), chunk=40)
    for req_id, prompt_len in (("a", 16), ("b", 40), ("c", 24)):
        engine.submit(req_id, prompt_len, 4)
    engine.step()
    return engine


def live_counts(engine: Engine) -> dict[str, int]:
    return {req_id: table.num_live_tokens for req_id, table in engine.world.tables.items()}


def test_with_ample_memory_nothing_is_dropped(make_world: MakeWorld) -> None:
    engine = Engine(make_world(num_blocks=65), make_config(when="pressure", kv_budget=4), RandomPolicy())
    engine.submit("a", 60, 60)
    while engine.step():
        assert engine.scheduler.relieve() == []
    assert engine.world.tables["a"].num_live_tokens == 120
    assert engine.scheduler.counters.num_evicted_tokens == 0


@pytest.mark.parametrize("regime", ["ordered", "fenced"])
def test_pressure_relieves_the_request_with_the_most_to_give_and_stops_when_enough_is_free(
    make_world: MakeWorld, regime: str
) -> None:
    world = make_world(num_blocks=21, regime=regime)
    engine = pressed_engine(world, pressure_low=0.05, pressure_high=0.4)
    assert world.pool.num_free == 0
    assert engine.scheduler.relieve() == ["b"]
    assert live_counts(engine) == {"a": 16, "b": 8, "c": 24}
    assert world.pool.num_free + world.pool.num_in_flight == 8  # 0.4 of 20
    engine.scheduler.end_pass()
    assert world.pool.num_free == 8
    world.check()


def test_pressure_goes_on_to_the_next_until_enough_is_free_or_nothing_is_left(make_world: MakeWorld) -> None:
    engine = pressed_engine(make_world(num_blocks=21), pressure_low=0.05, pressure_high=0.5)
    assert engine.scheduler.relieve() == ["b", "c"]
    assert live_counts(engine) == {"a": 16, "b": 8, "c": 8}
    engine = pressed_engine(make_world(num_blocks=21), pressure_low=1.0, pressure_high=1.0)
    assert engine.scheduler.relieve() == ["b", "c", "a"]
    assert live_counts(engine) == {"a": 8, "b": 8, "c": 8}
    assert engine.scheduler.relieve() == []


@pytest.mark.parametrize("protected", ["prompt", ((0, 999),)])
def test_a_request_that_must_keep_everything_has_nothing_to_give(make_world: MakeWorld, protected: Any) -> None:
    engine = pressed_engine(make_world(num_blocks=21), pressure_low=1.0, pressure_high=1.0, protected=protected)
    asked = []
    engine.scheduler.victims.choose = lambda *arguments: asked.append(arguments)  # type: ignore[method-assign]
    assert engine.scheduler.relieve(queue_blocked=True) == []
    assert not asked


def test_a_request_gives_down_to_what_it_keeps_if_that_is_more_than_its_budget(make_world: MakeWorld) -> None:
    options = {"pressure_low": 1.0, "pressure_high": 1.0, "protected": ((0, 20),)}
    engine = pressed_engine(make_world(num_blocks=21), **options)
    give = {name: engine.scheduler._blocks_to_give(name, each) for name, each in engine.scheduler._running.items()}
    assert give == {"a": 0, "b": 5, "c": 1}  # of 4, 10 and 6 blocks


def test_requests_may_differ_in_their_budget(make_world: MakeWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = pressed_engine(make_world(num_blocks=21), pressure_low=0.05, pressure_high=1.0)
    own = make_config(kv_budget=100)
    monkeypatch.setattr(KVScheduler, "config_of", lambda self, running: own if running.trace_key == 1 else self.config)
    assert engine.scheduler.relieve() == ["c", "a"]


def test_no_pressure_above_the_low_mark(make_world: MakeWorld) -> None:
    engine = pressed_engine(make_world(num_blocks=23), pressure_low=0.05, pressure_high=0.5)  # 2 of 22 are free
    assert engine.scheduler.relieve() == []
    assert live_counts(engine) == {"a": 16, "b": 40, "c": 24}


def test_a_blocked_queue_is_pressure_whatever_is_free(make_world: MakeWorld) -> None:
    engine = pressed_engine(make_world(num_blocks=31), pressure_low=0.05, pressure_high=0.1)  # 10 of 30 are free
    assert engine.scheduler.relieve(queue_blocked=True) == ["b"]
    assert live_counts(engine) == {"a": 16, "b": 8, "c": 24}


def test_equal_requests_give_in_the_order_of_their_submission(make_world: MakeWorld) -> None:
    engine = Engine(make_world(num_blocks=9), make_config(when="pressure", kv_budget=8), StreamingLLMPolicy(), chunk=16)
    engine.submit("late", 16, 4)
    engine.submit("early", 16, 4)
    engine.goals = {"early": engine.goals["early"], "late": engine.goals["late"]}
    engine.step()
    assert engine.scheduler.relieve() == ["late"]


def test_only_mode_pressure_relieves(make_world: MakeWorld) -> None:
    engine = Engine(make_world(num_blocks=5), make_config(kv_budget=16), StreamingLLMPolicy(), chunk=16)
    engine.submit("a", 16)
    engine.step()
    assert engine.scheduler.relieve(queue_blocked=True) == []


def test_pressure_kills_doomed_tokens_at_once_and_forgets_their_schedule(make_world: MakeWorld) -> None:
    events: list[TraceEvent] = []
    world = make_world(num_blocks=65)
    config = make_config(when="pressure", kv_budget=12, interval=8, pressure_low=1.0, pressure_high=1.0)
    engine = Engine(world, config, StreamingLLMPolicy(), events.append, chunk=20)
    engine.submit("a", 20, 20)
    engine.goals["a"] = (0, 20, 40)
    engine.scheduler._running["a"].must_evict = True  # longer than the pool: evicts by interval
    for _ in range(9):
        engine.step()
    assert world.tables["a"].num_doomed_tokens == 8
    engine.scheduler.relieve()
    assert (world.tables["a"].num_doomed_tokens, world.tables["a"].num_live_tokens) == (0, 12)
    assert events[-1].died == (28,) * 8
    before = live_counts(engine)
    engine.step()
    assert live_counts(engine) == {"a": before["a"] + 1}
    engine.run()
    assert run_on_trace(make_world, events) == engine.seen["a"]


def run_on_trace(make_world: MakeWorld, events: Sequence[TraceEvent]) -> dict[int, frozenset[int]]:
    engine = Engine(make_world(num_blocks=65), make_config(), trace_of(*events), chunk=20)
    engine.submit("a", 20, 20)
    return engine.run()["a"]


@pytest.mark.parametrize("options", [{}, {"mode": "lazy"}], ids=["eager", "lazy"])
@pytest.mark.parametrize("regime", ["ordered", "fenced"])
def test_a_request_longer_than_the_pool_runs_and_is_rebuilt_after_preemption(
    make_world: MakeWorld, options: dict[str, str], regime: str
) -> None:
    """200 + 100 tokens in a pool of 48, with 16 kept: it evicts between chunks, though memory would be ample."""
    world = make_world(num_blocks=13, regime=regime)
    config = make_config(when="pressure", kv_budget=16, **options)
    engine = Engine(world, config, StreamingLLMPolicy())
    engine.submit("a", 200, 100)
    steps = 0
    while engine.step():
        steps += 1
        if steps == 60:
            engine.preempt("a")
    world.check()
    table = world.tables["a"]
    assert (table.num_computed_tokens, table.num_live_tokens <= 16 + 4) == (300, True)


# -- admission (M-2) -------------------------------------------------------------------------------------------------


def test_admission_waits_for_what_eviction_has_freed_and_admits_after_the_next_pass(make_world: MakeWorld) -> None:
    engine = Engine(make_world(num_blocks=9), make_config(kv_budget=8), StreamingLLMPolicy(), chunk=32)
    engine.submit("a", 32, 8)
    engine.step()
    assert engine.scheduler.can_admit(8, 8).answer is Answer.WAIT_FOR_RECLAMATION
    engine.scheduler.begin_pass({})
    assert engine.scheduler.can_admit(8, 8).answer is Answer.ADMIT
    assert engine.scheduler.can_admit(28, 28).answer is Answer.QUEUE
    result = engine.scheduler.can_admit(8, 28, chunk_tokens=8)
    assert result.answer is Answer.NEVER_FITS
    assert "needs 9 blocks at its worst, the pool has 8" in result.reason


# -- mistakes --------------------------------------------------------------------------------------------------------


def test_a_write_must_be_what_the_pass_was_told(make_world: MakeWorld) -> None:
    engine = Engine(make_world(), make_config(), RandomPolicy())
    engine.submit("a", 8)
    engine.scheduler.begin_pass({"a": 4})
    with pytest.raises(SpecError, match="request 'a' writes 5 tokens, begin_pass was told 4"):
        engine.scheduler.write("a", 5, engine.world._write("a", 5))


def test_a_prompt_has_a_token(make_world: MakeWorld) -> None:
    engine = Engine(make_world(), make_config(), RandomPolicy())
    with pytest.raises(SpecError, match="prompt_len=0 of request 'a': give at least 1 token"):
        engine.scheduler.admit("a", 0, 0)
    assert "a" not in engine.world.tables


def test_counters_prove_that_it_ran(make_world: MakeWorld) -> None:
    engine = run(make_world, RandomPolicy(), {})
    counters = engine.scheduler.counters
    tables = engine.world.tables.values()
    assert counters.num_evicted_tokens == sum(table.num_evicted_tokens for table in tables) > 0
    assert 0 < counters.num_recycled_tokens < counters.num_evicted_tokens
    assert counters.num_plans == engine.scheduler.manager.num_plans > 0
    assert counters.num_moved_tokens == engine.scheduler.manager.num_moves > 0
    assert counters.num_freed_blocks > 0


# -- anything goes ---------------------------------------------------------------------------------------------------


class Arbitrary(Policy):
    """Chooses by a seeded hash among all candidates, as few or as many as it likes, whatever the budget."""

    name = "arbitrary"

    def __init__(self, seed: int, share: float) -> None:
        self.seed, self.share = seed, share

    def select_victims(self, view: RequestView) -> Sequence[Position]:
        def draw(position: int) -> float:
            return hash((self.seed, position, view.num_computed_tokens)) % 1000 / 1000

        return [position for position in view.live_positions[:-1] if draw(position) < self.share]


@settings(max_examples=40)
@given(
    seed=st.integers(0, 1000),
    share=st.floats(0, 0.6),
    prompts=st.lists(st.tuples(st.integers(1, 30), st.integers(0, 30)), min_size=1, max_size=3),
    interval=st.integers(1, 9),
    chunk=st.integers(1, 12),
    regime=st.sampled_from(["ordered", "fenced"]),
    stops=st.dictionaries(st.integers(1, 40), st.integers(0, 2), max_size=4),
)
def test_whatever_a_policy_chooses_all_variants_agree_and_every_invariant_holds(
    make_world: MakeWorld,
    seed: int,
    share: float,
    prompts: list[tuple[int, int]],
    interval: int,
    chunk: int,
    regime: str,
    stops: dict[int, int],
) -> None:
    trace = VictimTrace()
    outcomes = []
    for variant, options in VARIANTS.items():
        config = make_config(interval=interval, **options)
        victims = Arbitrary(seed, share) if variant == "eager" else trace
        engine = Engine(make_world(regime=regime, num_blocks=65), config, victims, trace.add, chunk)
        for index, (prompt_len, num_output) in enumerate(prompts):
            engine.submit(f"r{index}", prompt_len, num_output)
        steps = 0
        while engine.step():
            engine.world.check()
            steps += 1
            if stops.get(steps, 9) < len(prompts):
                engine.preempt(f"r{stops[steps]}")
        outcomes.append(engine.seen)
    assert all(outcome == outcomes[0] for outcome in outcomes)


class Crowded(Engine):
    """Requests leave at their end. Without room, relief is asked for, then the youngest holder is preempted."""

    def make_way(self) -> None:
        self.world.check()
        if not self.scheduler.relieve(queue_blocked=True):
            holders = [req_id for req_id in self.goals if self.world.tables[req_id].block_ids]
            assert len(holders) > 1, "one request alone does not fit"
            self.preempt(holders[-1])

    def run_all(self) -> None:
        while self.step():
            self.scheduler.relieve()
            self.world.check()
            for req_id, (_, _, total) in list(self.goals.items()):
                if self.world.tables[req_id].num_computed_tokens == total:
                    self.scheduler.finish(req_id)
                    del self.goals[req_id]


@settings(max_examples=60)
@given(
    options=st.sampled_from(list(VARIANTS.values())),
    when=st.sampled_from(["always", "pressure"]),
    regime=st.sampled_from(["ordered", "fenced"]),
    prompts=st.lists(st.tuples(st.integers(10, 30), st.integers(0, 20)), min_size=3, max_size=5),
    num_blocks=st.integers(14, 18),
    chunk=st.integers(1, 8),
    high=st.sampled_from([0.1, 0.5]),
)
def test_in_a_pool_too_small_for_all_everybody_ends_and_every_block_comes_back(
    make_world: MakeWorld,
    options: dict[str, Any],
    when: str,
    regime: str,
    prompts: list[tuple[int, int]],
    num_blocks: int,
    chunk: int,
    high: float,
) -> None:
    config = make_config(when=when, kv_budget=8, pressure_low=0.1, pressure_high=high, **options)
    engine = Crowded(make_world(num_blocks=num_blocks, regime=regime), config, RandomPolicy(), chunk=chunk)
    for index, (prompt_len, num_output) in enumerate(prompts):
        engine.submit(f"r{index}", prompt_len, num_output)
    engine.run_all()
    assert not engine.goals
    assert (engine.world.pool.num_free, engine.world.pool.num_in_flight) == (num_blocks - 1, 0)
