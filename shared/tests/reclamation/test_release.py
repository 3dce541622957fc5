from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

MakeWorld = Callable[..., Any]


def test_blocks_without_a_live_token_leave_and_nothing_moves(make_world: MakeWorld, draw: Callable[..., str]) -> None:
    world = make_world()
    table = world.lay("a", "x... .... .x.. .... .... x")
    plan = world.reclaim("release", "a")
    assert (plan.moves, plan.freed_block_ids, plan.new_block_ids) == ((), (2, 4, 5), ())
    assert draw(table) == "0 . . . | . 9 . . | 20 _ _ _"
    world.check()


@pytest.mark.parametrize("tail", ["....", "..", "xxxx"])
def test_the_tail_block_stays(make_world: MakeWorld, tail: str) -> None:
    world = make_world()
    table = world.lay("a", "xxxx " + tail)
    assert world.plan("release", "a") is None
    assert len(table.block_ids) == 2


def test_a_dead_tail_block_leaves_once_another_follows_it(make_world: MakeWorld) -> None:
    world = make_world()
    world.lay("a", "xxxx ....")
    world.grow("a", 1)
    assert world.reclaim("release", "a").freed_block_ids == (2,)
    world.check()


def test_a_block_with_a_doomed_token_stays(make_world: MakeWorld) -> None:
    world = make_world()
    world.lay("a", "...d x")
    assert world.plan("release", "a") is None


def test_a_shared_block_is_let_go_and_stays_with_its_other_holder(make_world: MakeWorld) -> None:
    world = make_world()
    world.lay("a", "xxxx x")
    world.fork_prefix("a", "b", 4)
    world.kill("a", [0, 1, 2, 3])
    free = world.pool.num_free
    assert world.reclaim("release", "a").freed_block_ids == (1,)
    assert world.pool.num_free == free
    assert world.pool.is_private(1)
    world.check()


@given(st.lists(st.booleans(), min_size=1, max_size=40))
def test_release_frees_exactly_the_dead_blocks_before_the_tail(make_world: MakeWorld, alive: list[bool]) -> None:
    world = make_world()
    table = world.lay("a", "".join("x" if live else "." for live in alive))
    blocks = list(table.block_ids)
    dead = [block for i, block in enumerate(blocks[:-1]) if not any(alive[i * 4 : i * 4 + 4])]
    plan = world.plan("release", "a")
    if not dead:
        assert plan is None
        return
    world.launch(plan)
    assert (list(plan.freed_block_ids), plan.moves) == (dead, ())
    assert table.block_ids == [block for block in blocks if block not in dead]
    assert table.live_positions() == [i for i, live in enumerate(alive) if live]
    assert world.plan("release", "a") is None
    world.grow("a", 3)
    world.check()
