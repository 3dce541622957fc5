from collections.abc import Callable
from dataclasses import FrozenInstanceError
from typing import Any

import pytest

from vtoken.block_pool import BlockPool
from vtoken.errors import SpecError
from vtoken.reclamation import (
    EvacuatePlanner,
    FillPlanner,
    Planner,
    PoolView,
    ReclamationPlan,
    ReleasePlanner,
    TableView,
    get_planner,
)
from vtoken.reclamation.plan import tokens_in
from vtoken.request_table import RequestTable


def test_a_plan_cannot_be_changed() -> None:
    plan = ReclamationPlan("a", 1, 2, 3, moves=(), freed_block_ids=(4, 5), new_block_ids=(6,))
    with pytest.raises(FrozenInstanceError):
        plan.packed = True  # type: ignore[misc]


@pytest.mark.parametrize(("freed", "new", "gained"), [((4, 5), (6,), 1), ((4,), (), 1), ((), (6, 7), -2), ((), (), 0)])
def test_blocks_gained_are_those_freed_less_those_taken(
    freed: tuple[int, ...], new: tuple[int, ...], gained: int
) -> None:
    assert ReclamationPlan("a", 1, 2, 3, (), freed, new).num_blocks_gained == gained


def test_table_and_pool_are_views() -> None:
    table: TableView = RequestTable("a", 4)
    pool: PoolView = BlockPool(5)
    assert get_planner("fill").plan(table, pool) is None


@pytest.mark.parametrize(
    ("name", "kind"), [("evacuate", EvacuatePlanner), ("fill", FillPlanner), ("release", ReleasePlanner)]
)
def test_planners_are_found_by_name(name: str, kind: type[Planner]) -> None:
    assert type(get_planner(name)) is kind


def test_an_unknown_planner_is_refused_with_the_known_ones() -> None:
    with pytest.raises(SpecError, match="unknown planner 'defrag': choose one of evacuate, fill, release"):
        get_planner("defrag")


def test_the_tokens_of_a_block_are_named_by_position_and_slot(make_world: Callable[..., Any]) -> None:
    world = make_world()
    world.lay("other", "x")
    table = world.lay("a", "x.xx .xx. x")
    assert list(tokens_in(table, 1, 0b0110)) == [(5, 13), (6, 14)]
    assert list(tokens_in(table, 1, 0b0100)) == [(6, 14)]
    assert list(tokens_in(table, 1, 0)) == []


@pytest.mark.parametrize("planner", ["evacuate", "fill", "release"])
def test_planning_changes_nothing(make_world: Callable[..., Any], state_of: Callable[..., Any], planner: str) -> None:
    world = make_world()
    table = world.lay("a", "x.d. x... .... xx")
    before = (state_of(table), world.observe(), world.pool.free_block_ids())
    first = world.plan(planner, "a")
    assert first is not None
    assert world.plan(planner, "a") == first
    assert (state_of(table), world.observe(), world.pool.free_block_ids()) == before


@pytest.mark.parametrize("planner", ["evacuate", "fill", "release"])
def test_nothing_is_planned_while_a_plan_is_in_flight(make_world: Callable[..., Any], planner: str) -> None:
    world = make_world()
    table = world.lay("a", "x.d. x... .... xx")
    table.plan_in_flight = True
    assert world.plan(planner, "a") is None


@pytest.mark.parametrize("planner", ["evacuate", "fill", "release"])
def test_nothing_is_planned_for_an_empty_request(make_world: Callable[..., Any], planner: str) -> None:
    world = make_world()
    world.admit("a")
    assert world.plan(planner, "a") is None


@pytest.mark.parametrize("planner", ["evacuate", "fill", "release"])
def test_nothing_is_planned_where_nothing_is_dead(make_world: Callable[..., Any], planner: str) -> None:
    world = make_world()
    world.lay("a", "xxxx xdxx xx")
    assert world.plan(planner, "a") is None
