"""Preempted requests see what they would have seen, and give everything back (SPEC K-4, Q-4)."""

import pytest
from scheduler_world import VARIANTS, Engine, MakeWorld, Seen, make_config

from vtoken.policies.random import RandomPolicy
from vtoken.trace import TraceEvent, VictimTrace


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
