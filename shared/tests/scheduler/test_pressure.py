"""Eviction under pressure: who gives, how much, and when (SPEC M-3, M-5)."""

from collections.abc import Sequence
from typing import Any

import pytest
from scheduler_world import Engine, MakeWorld, make_config, trace_of

from vtoken.policies.random import RandomPolicy
from vtoken.policies.streaming_llm import StreamingLLMPolicy
from vtoken.scheduler import KVScheduler
from vtoken.trace import TraceEvent


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
