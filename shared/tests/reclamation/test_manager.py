from collections.abc import Callable
from typing import Any

import pytest

from vtoken.config import VTokenConfig
from vtoken.reclamation.manager import ReclamationManager
from vtoken.types import cdiv

MakeWorld = Callable[..., Any]


def make_manager(**options: Any) -> ReclamationManager:
    return ReclamationManager(VTokenConfig(**{"policy": "any", "kv_budget": 8, **options}))


# -- native ----------------------------------------------------------------------------------------------------------


def test_the_native_variant_plans_nothing(make_world: MakeWorld) -> None:
    world = make_world()
    table = world.lay("a", ".... x..x ....")
    manager = make_manager(variant="native")
    assert not manager.check(table, world.pool, 0)
    assert manager.plan(table, world.pool, 0, force=True) is None


# -- naive -----------------------------------------------------------------------------------------------------------


def test_the_naive_variant_releases_dead_blocks_and_moves_nothing(make_world: MakeWorld) -> None:
    world = make_world()
    table = world.lay("a", ".... x..x .... x")
    plan = make_manager(variant="naive").plan(table, world.pool, 0)
    assert plan is not None
    assert (plan.moves, plan.freed_block_ids) == ((), (1, 3))


def test_the_naive_variant_looks_once_a_kill(make_world: MakeWorld) -> None:
    world = make_world()
    table = world.lay("a", "xxx. xxxx x")
    manager = make_manager(variant="naive")
    assert manager.check(table, world.pool, 0)
    assert manager.plan(table, world.pool, 0) is None
    assert not manager.check(table, world.pool, 1)
    world.grow("a", 1)
    assert not manager.check(table, world.pool, 2)
    world.kill("a", [4])
    assert manager.check(table, world.pool, 3)


def test_the_naive_variant_frees_a_dead_tail_block_once_another_follows_it(make_world: MakeWorld) -> None:
    world = make_world()
    table = world.lay("a", "xxxx ....")
    manager = make_manager(variant="naive")
    assert manager.plan(table, world.pool, 0) is None
    world.grow("a", 1)
    plan = manager.plan(table, world.pool, 1)
    assert plan is not None
    assert plan.freed_block_ids == (2,)


def test_the_naive_variant_does_not_look_where_nothing_is_dead(make_world: MakeWorld) -> None:
    world = make_world()
    assert not make_manager(variant="naive").check(world.lay("a", "xxxx xxdx x"), world.pool, 0)


# -- eager -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "picture", ["x", "xxxx", "xxxx x", "x.", ".", "....", "xxx.", ".xxx xxxx", "xxxx x.", "xxxx ...."]
)
def test_eager_mode_is_due_exactly_where_the_layout_is_not_packed(make_world: MakeWorld, picture: str) -> None:
    world = make_world()
    table = world.lay("a", picture)
    assert make_manager().check(table, world.pool, 0) == (not table.is_packed)


def test_eager_mode_is_not_due_for_an_empty_request(make_world: MakeWorld) -> None:
    world = make_world()
    world.admit("a")
    assert not make_manager().check(world.tables["a"], world.pool, 0)


def test_eager_mode_is_due_where_blocks_are_held_ahead_of_their_tokens(make_world: MakeWorld) -> None:
    world = make_world()
    table = world.lay("a", "xxxx")
    table.sync_new_tokens([*table.block_ids, *world.pool.allocate(1)], 4)
    assert make_manager().check(table, world.pool, 0)


def test_eager_mode_fills(make_world: MakeWorld) -> None:
    world = make_world()
    table = world.lay("a", "x.xx ..xx x")
    plan = make_manager().plan(table, world.pool, 0)
    assert plan is not None
    assert plan.packed


def test_nothing_is_due_while_a_plan_is_in_flight(make_world: MakeWorld) -> None:
    world = make_world()
    table = world.lay("a", ".... x... .... x")
    table.plan_in_flight = True
    for options in ({}, {"mode": "lazy"}, {"variant": "naive"}):
        assert not make_manager(**options).check(table, world.pool, 0, force=True)


# -- lazy (M-4) ------------------------------------------------------------------------------------------------------


def lazy_world(make_world: MakeWorld, picture: str, num_free: int) -> tuple[Any, Any]:
    world = make_world(num_blocks=cdiv(len(picture.replace(" ", "")), 4) + num_free + 1)
    return world, world.lay("a", picture)


FRAGMENTED = "x... x... xxxx x..."  # F = 9 / 16


def test_lazy_mode_evacuates_a_fragmented_request_when_few_blocks_are_free(make_world: MakeWorld) -> None:
    world, table = lazy_world(make_world, FRAGMENTED, num_free=1)
    plan = make_manager(mode="lazy", low_watermark=0.2).plan(table, world.pool, 0)
    assert plan is not None
    assert (plan.freed_block_ids, plan.packed) == ((1, 2), False)


def test_lazy_mode_waits_while_many_blocks_are_free(make_world: MakeWorld) -> None:
    world, table = lazy_world(make_world, FRAGMENTED, num_free=1)  # 1 of 5 blocks
    assert not make_manager(mode="lazy", low_watermark=0.19).check(table, world.pool, 0)
    assert make_manager(mode="lazy", low_watermark=0.2).check(table, world.pool, 0)


@pytest.mark.parametrize(("theta", "is_due"), [(0.55, True), (0.5625, False), (0.6, False)])
def test_lazy_mode_wants_more_fragmentation_than_theta(make_world: MakeWorld, theta: float, is_due: bool) -> None:
    world, table = lazy_world(make_world, FRAGMENTED, num_free=1)
    manager = make_manager(mode="lazy", low_watermark=1.0, theta_fragmentation=theta)
    assert manager.check(table, world.pool, 0) == is_due


def test_lazy_mode_never_checks_an_empty_request(make_world: MakeWorld) -> None:
    world = make_world()
    world.admit("a")
    manager = make_manager(mode="lazy", low_watermark=1.0, theta_fragmentation=0.0)
    assert not manager.check(world.tables["a"], world.pool, 0)


def test_lazy_mode_wants_enough_sources(make_world: MakeWorld) -> None:
    world, table = lazy_world(make_world, FRAGMENTED, num_free=1)
    manager = make_manager(mode="lazy", low_watermark=1.0, min_source_blocks=3)
    assert manager.plan(table, world.pool, 0) is None
    assert manager.refused == {"too few sources": 1}


def test_lazy_mode_rests_after_an_attempt(make_world: MakeWorld) -> None:
    world, table = lazy_world(make_world, "xx.. xx.. x...", num_free=1)
    manager = make_manager(mode="lazy", low_watermark=1.0, cooldown_steps=8, min_source_blocks=3)
    assert manager.plan(table, world.pool, 10) is None
    assert [step for step in range(10, 20) if manager.check(table, world.pool, step)] == [18, 19]
    manager.forget("a")
    assert manager.check(table, world.pool, 11)


@pytest.mark.parametrize(
    ("picture", "num_free", "reason"),
    [
        ("xx.. xx.. x...", 0, "no target free"),
        ("xx.. xx.. xx.. xx.. x...", 0, "no target free"),
        ("xx.. xxxx x...", 0, "not profitable"),  # a block for a block, whatever is free
        ("xx.. xxxx x...", 4, "not profitable"),
    ],
)
def test_lazy_mode_counts_why_an_attempt_came_to_nothing(
    make_world: MakeWorld, picture: str, num_free: int, reason: str
) -> None:
    world, table = lazy_world(make_world, picture, num_free=num_free)
    manager = make_manager(mode="lazy", theta_fragmentation=0.0)
    assert manager.plan(table, world.pool, 0, force=True) is None
    assert manager.refused == {reason: 1}
    assert (manager.num_plans, manager.num_moves) == (0, 0)


def test_naive_counts_attempts_that_found_no_dead_block(make_world: MakeWorld) -> None:
    world = make_world()
    manager = make_manager(variant="naive")
    assert manager.plan(world.lay("a", "x.xx ..xx x"), world.pool, 0) is None
    assert manager.refused == {"no block without a live token": 1}


def test_an_exhausted_pool_skips_the_watermark_the_rest_and_the_number_of_sources(make_world: MakeWorld) -> None:
    world, table = lazy_world(make_world, FRAGMENTED, num_free=9)
    manager = make_manager(mode="lazy", low_watermark=0.0, min_source_blocks=9)
    assert manager.plan(table, world.pool, 0) is None
    assert manager.plan(table, world.pool, 0, force=True) is not None
    assert manager.plan(table, world.pool, 1, force=True) is not None


def test_even_an_exhausted_pool_leaves_an_unfragmented_request_alone(make_world: MakeWorld) -> None:
    world, table = lazy_world(make_world, "xxxx xxx. xxxx", num_free=0)
    assert not make_manager(mode="lazy").check(table, world.pool, 0, force=True)


# -- counters --------------------------------------------------------------------------------------------------------


def test_plans_and_moves_are_counted(make_world: MakeWorld) -> None:
    world = make_world()
    manager = make_manager()
    for req_id, picture in (("a", "x.xx ..xx x"), ("b", "....")):
        assert manager.plan(world.lay(req_id, picture), world.pool, 0) is not None
    assert (manager.num_plans, manager.num_moves, manager.refused) == (2, 3, {})


def test_a_check_looks_at_no_block(make_world: MakeWorld) -> None:
    """So that it costs the same at any length."""
    world = make_world()
    table = world.lay("a", "x.xx ..xx xxx. x")

    class Lengths(list[int]):
        def __iter__(self) -> Any:
            raise AssertionError("iterated")

        __getitem__ = __contains__ = __iter__  # type: ignore[assignment]

    table.block_ids = Lengths(table.block_ids)
    table.live_words = Lengths(table.live_words)
    for options in ({}, {"mode": "lazy", "low_watermark": 1.0}, {"variant": "naive"}, {"variant": "native"}):
        make_manager(**options).check(table, world.pool, 0)
