"""A pool without room: writes that must wait (SPEC Q-5), and admission (M-2)."""

import pytest
from scheduler_world import Engine, MakeWorld, make_config, trace_of

from vtoken.errors import PoolExhausted
from vtoken.policies.streaming_llm import StreamingLLMPolicy
from vtoken.reclamation.admission import Answer
from vtoken.trace import TraceEvent

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
