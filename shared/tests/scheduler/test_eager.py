"""Eager mode: packed in every step, recycled without copies, within the bound; shared prefixes."""

from typing import Any

import pytest
from scheduler_world import VARIANTS, Engine, MakeWorld, make_config, trace_of

from vtoken.policies.random import RandomPolicy
from vtoken.policies.streaming_llm import StreamingLLMPolicy
from vtoken.trace import TraceEvent
from vtoken.types import cdiv


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
