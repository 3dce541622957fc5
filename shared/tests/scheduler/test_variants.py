"""One victim trace in all variants: who is live at which count (SPEC K)."""

import pytest
from scheduler_world import VARIANTS, Engine, MakeWorld, Seen, make_config, run, trace_of

from vtoken.policies.random import RandomPolicy
from vtoken.trace import TraceEvent, VictimTrace


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
