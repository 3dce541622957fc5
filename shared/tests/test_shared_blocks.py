"""Blocks with several holders under the executor: forks, plans and kills hurt nobody else (SPEC Q-2, Q-3, INV-7)."""

from collections.abc import Callable
from typing import Any

import pytest

from vtoken.errors import SpecError
from vtoken.types import Move

MakeWorld = Callable[..., Any]


def test_a_fork_shares_blocks_and_takes_none(make_world: MakeWorld) -> None:
    world = make_world()
    world.lay("a", "xxxx xxxx xx")
    free = world.pool.num_free
    world.fork_prefix("a", "b", 8)
    assert world.tables["b"].block_ids == world.tables["a"].block_ids[:2]
    assert world.pool.num_free == free
    world.grow("b", 1)
    assert world.pool.num_free == free - 1
    world.check()


@pytest.mark.parametrize("planner", ["fill", "evacuate", "release"])
def test_of_eight_requests_on_one_prefix_one_evicts_and_the_others_see_nothing(
    make_world: MakeWorld, planner: str
) -> None:
    world = make_world(num_blocks=33)
    world.lay("a", "xxxx xxxx xxxx xxxx x")
    others = [f"o{i}" for i in range(7)]
    for req_id in others:
        world.fork_prefix("a", req_id, 16)
        world.grow(req_id, 2)
    before = {r: (world.observe().requests[r], world.attend(r, world.query()).out) for r in others}
    world.kill("a", [1, 5, 8, 9, 10, 11])
    world.doom("a", [4])
    plan = world.plan(planner, "a")
    assert (plan is None) == (planner == "evacuate")  # it has no private source
    if plan is not None:
        world.launch(plan)
    world.grow("a", 5)
    assert {r: (world.observe().requests[r], world.attend(r, world.query()).out) for r in others} == before
    world.check()


def test_a_token_killed_in_one_holder_lives_on_in_the_other(make_world: MakeWorld) -> None:
    world = make_world()
    world.lay("a", "xxxx xxxx")
    world.fork_prefix("a", "b", 8)
    world.kill("a", [0, 5])
    assert world.observe().requests["a"].positions == (1, 2, 3, 4, 6, 7)
    assert world.observe().requests["b"].positions == (0, 1, 2, 3, 4, 5, 6, 7)
    world.finish("a")
    world.check()


def test_a_plan_into_a_hole_of_a_shared_block_is_refused(make_world: MakeWorld) -> None:
    world = make_world()
    world.lay("a", "xxxx xxx.")
    world.kill("a", [1])
    plan = world.plan("fill", "a")
    assert plan.moves == (Move(6, 10, 5),)
    world.pool.set_hashed(1, True)
    before = world.observe()
    with pytest.raises(SpecError, match="INV-7: plan of request 'a' writes into block 1, which is shared or hashed"):
        world.launch(plan)
    assert world.observe() == before
    world.check()


def test_a_plan_whose_target_was_taken_meanwhile_is_refused_and_changes_nothing(make_world: MakeWorld) -> None:
    world = make_world(num_blocks=6)
    world.lay("a", "x... x... .... x")
    plan = world.plan("evacuate", "a")
    world.lay("b", "x")
    before = world.observe()
    with pytest.raises(SpecError, match=r"take: blocks \[5\] are not free"):
        world.launch(plan)
    assert world.observe() == before
    world.check()
