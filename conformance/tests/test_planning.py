"""The planners read off the spec, on hand-drawn layouts: rows in, rows out."""

import pytest

from vtoken.executor import KVSpec
from vtoken_conformance.model import Model
from vtoken_conformance.planning import expected_change
from vtoken_conformance.state import Block, Request

N = None


def world(rows, cursor, shared=(), num_blocks=20):
    """A model with one request of these rows; blocks at the indices in ``shared`` have a second holder."""
    spec = KVSpec(
        num_layers=1,
        num_kv_heads=1,
        num_query_heads=1,
        head_size=1,
        dtype="float16",
        block_size=4,
        num_blocks=num_blocks,
    )
    model = Model(spec)
    live = [position for row in rows for position in row if position is not N]
    request = Request([Block() for _ in rows], [list(row) for row in rows], dict.fromkeys(live, b""), [], 99, cursor)
    model.requests["a"] = request
    if shared:
        model.requests["other"] = Request([request.blocks[i] for i in shared], [[N] * 4 for _ in shared])
    return model


def after(model, planner, num_targets=20):
    """The rows after the plan, or None without one."""
    change = expected_change(planner, model, "a", num_targets)
    if change is None:
        return None
    model.apply("a", change)
    return model.requests["a"].rows


def test_release_drops_dead_blocks_and_keeps_the_tail():
    rows = [[N, N, N, N], [4, 5, N, 7], [N, N, N, N], [N, N, N, N]]
    assert after(world(rows, 14), "release") == [[4, 5, N, 7], [N, N, N, N]]
    assert after(world([[4, N, N, N], [N, N, N, N]], 6), "release") is None


def test_fill_takes_movers_in_order_into_the_lowest_holes():
    rows = [[0, N, N, 3], [4, N, 6, 7], [8, 9, N, N]]
    model = world(rows, 10)
    assert after(model, "fill") == [[0, 7, 8, 3], [4, 9, 6, N]]
    assert model.requests["a"].cursor == 7


def test_fill_keeps_the_fullest_blocks_in_their_order():
    rows = [[0, N, N, N], [4, 5, 6, 7], [8, 9, N, N]]
    assert after(world(rows, 10), "fill") == [[4, 5, 6, 7], [8, 9, 0, N]]
    assert after(world([[0, N, N, N], [N, 5, N, N], [8, N, N, N]], 9), "fill") == [[0, 5, 8, N]]


def test_fill_of_a_packed_request_is_no_plan():
    assert after(world([[0, 9, 2, 3], [4, N, N, N]], 5), "fill") is None
    assert after(world([], 0), "fill") is None
    assert after(world([[0, N, N, N]], 2), "fill") == [[0, N, N, N]]


def test_fill_keeps_full_shared_blocks_and_leaves_shared_blocks_with_holes():
    rows = [[0, 1, 2, 3], [4, N, 6, 7], [8, 9, N, N]]
    assert after(world(rows, 10, shared=(0, 1)), "fill") == [[0, 1, 2, 3], [8, 9, 4, 6], [7, N, N, N]]
    assert after(world(rows, 10, shared=(0, 1)), "fill", num_targets=0) is None


def test_fill_never_leaves_a_partly_filled_block_before_a_shared_one():
    rows = [[0, N, 2, N], [4, 5, 6, 7], [8, 9, 10, 11]]
    assert after(world(rows, 12, shared=(1, 2)), "fill") == [[4, 5, 6, 7], [8, 9, 10, 11], [0, 2, N, N]]


def test_fill_keeps_a_private_block_that_it_can_fill_before_a_shared_one():
    rows = [[0, N, 2, 3], [4, 5, 6, 7], [8, N, N, N]]
    assert after(world(rows, 9, shared=(1,)), "fill") == [[0, 8, 2, 3], [4, 5, 6, 7]]


def test_evacuate_carries_sources_in_order_before_the_tail():
    rows = [[N, 1, N, N], [4, 5, 6, N], [8, N, N, 11], [12, N, N, N]]
    assert after(world(rows, 13), "evacuate") == [[4, 5, 6, N], [1, 8, 11, N], [12, N, N, N]]


def test_evacuate_needs_a_gain():
    assert after(world([[N, 1, 2, N], [4, 5, 6, 7], [8, N, N, N]], 9), "evacuate") is None
    assert after(world([[0, 1, N, N], [4, 5, N, N], [8, N, N, N]], 9), "evacuate") == [[0, 1, 4, 5], [8, N, N, N]]


def test_evacuate_leaves_shared_blocks_and_the_tail():
    rows = [[N, 1, N, N], [4, N, N, N], [8, N, N, N]]
    assert after(world(rows, 9, shared=(0,)), "evacuate") is None


def test_evacuate_takes_the_emptiest_sources_that_it_can_afford():
    rows = [[0, 1, N, N], [4, 5, N, N], [8, N, N, N], [12, N, N, N], [16, N, N, N]]
    assert after(world(rows, 17), "evacuate", num_targets=1) == [[4, 5, N, N], [0, 1, 8, 12], [16, N, N, N]]
    assert after(world(rows, 17), "evacuate", num_targets=0) is None


@pytest.mark.parametrize("planner", ["release", "fill", "evacuate"])
def test_nothing_is_planned_while_a_plan_is_in_flight(planner):
    model = world([[N, N, N, N], [N, N, N, N], [8, N, N, N]], 9)
    model.requests["a"].plan_in_flight = True
    assert expected_change(planner, model, "a", 20) is None
