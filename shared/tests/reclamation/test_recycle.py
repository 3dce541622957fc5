from collections.abc import Callable
from typing import Any

from vtoken.reclamation.recycle import recyclable

MakeWorld = Callable[..., Any]


def test_the_next_doomed_token_is_recyclable(make_world: MakeWorld) -> None:
    world = make_world()
    table = world.lay("a", "xdxx xd")
    assert recyclable(table, world.pool) == 1
    world.recycle_next("a")
    assert recyclable(table, world.pool) == 5
    world.recycle_next("a")
    assert recyclable(table, world.pool) is None


def test_without_a_doomed_token_nothing_is_recyclable_whatever_the_holes(make_world: MakeWorld) -> None:
    world = make_world()
    assert recyclable(world.lay("a", "x..x x"), world.pool) is None


def test_nothing_is_recyclable_while_a_plan_is_in_flight(make_world: MakeWorld) -> None:
    world = make_world()
    table = world.lay("a", "xdxx x")
    table.plan_in_flight = True
    assert recyclable(table, world.pool) is None


def test_a_slot_in_a_shared_block_is_not_recyclable_until_the_other_holder_is_gone(make_world: MakeWorld) -> None:
    world = make_world()
    table = world.lay("a", "xdxx x")
    world.fork_prefix("a", "b", 4)
    assert recyclable(table, world.pool) is None
    world.finish("b")
    assert recyclable(table, world.pool) == 1


def test_a_slot_in_a_hashed_block_is_not_recyclable(make_world: MakeWorld) -> None:
    world = make_world()
    table = world.lay("a", "xdxx x")
    world.pool.set_hashed(1, True)
    assert recyclable(table, world.pool) is None


def test_the_queue_is_not_jumped_where_its_head_is_not_recyclable(make_world: MakeWorld) -> None:
    world = make_world()
    table = world.lay("a", "xdxx xd")
    world.pool.set_hashed(1, True)
    assert recyclable(table, world.pool) is None
    world.kill("a", [1])
    assert recyclable(table, world.pool) == 5


def test_a_moved_victim_is_looked_for_where_it_is_now(make_world: MakeWorld) -> None:
    world = make_world()
    table = world.lay("a", "x... .... .d")
    world.pool.set_hashed(3, True)
    assert recyclable(table, world.pool) is None
    world.reclaim("fill", "a")
    assert recyclable(table, world.pool) == 9
