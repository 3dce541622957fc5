"""Mistakes of the caller, and the counters."""

import pytest
from scheduler_world import Engine, MakeWorld, make_config, run

from vtoken.errors import SpecError
from vtoken.policies.random import RandomPolicy


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
