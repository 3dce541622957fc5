"""Each invariant passes on a sound state and fails, by its number, on states that break it."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from vtoken import invariants
from vtoken.errors import InvariantError
from vtoken.reclamation import ReclamationPlan
from vtoken.types import Move


@pytest.fixture
def world(make_world: Callable[..., Any]) -> Any:
    """Requests a: ``0 1 2 3 | . . . 7 | 8 . . . | 12 13 _ _`` in blocks 1 to 4, and b, who shares block 1."""
    world = make_world()
    world.lay("a", "xxxx ...x x... xx")
    world.fork_prefix("a", "b", 4)
    return world


def broken(number: int, words: str = "") -> Any:
    return pytest.raises(InvariantError, match=f"^INV-{number}: .*{words}")


def test_a_sound_state_passes(world: Any) -> None:
    invariants.check_all(world.tables, world.pool)


# -- INV-1 -----------------------------------------------------------------------------------------------------------


def test_inv_1_a_relocation_keeps_positions_and_bytes() -> None:
    before = {0: b"x", 5: b"y"}
    invariants.check_conservation("a", before, dict(reversed(before.items())))
    with broken(1, "request 'a', position 5: expected b'y', got dead"):
        invariants.check_conservation("a", before, {0: b"x"})
    with broken(1, "position 3: expected dead, got b'z'"):
        invariants.check_conservation("a", before, {**before, 3: b"z"})
    with broken(1, "position 0: expected b'x', got b'q'"):
        invariants.check_conservation("a", before, {**before, 0: b"q"})


# -- INV-2 -----------------------------------------------------------------------------------------------------------


def revive_a_dead_token(world: Any) -> None:
    world.tables["a"].live_words[1] |= 1


def put_two_positions_into_one_slot(world: Any) -> None:
    world.tables["a"]._place[13] = 12


def put_one_position_into_two_slots(world: Any) -> None:
    world.tables["a"]._position[13] = 12


def leave_a_token_behind_the_cursor(world: Any) -> None:
    world.tables["a"].cursor = 13


def lose_a_token(world: Any) -> None:
    world.tables["a"].live_words[3] = 0b01


def forget_a_holder(world: Any) -> None:
    world.pool.free([1])


def hold_a_block_twice(world: Any) -> None:
    world.tables["b"].sync_new_tokens([1, 2], 4)


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (revive_a_dead_token, "position 4, seen live in slot 8: expected none, it is dead, got 4"),
        (put_two_positions_into_one_slot, "position 13, seen live in slot 17: expected 12, got 13"),
        (put_one_position_into_two_slots, "position 12, seen live in slot 17: expected 12, got 13"),
        (leave_a_token_behind_the_cursor, "position 13, .* expected before the cursor, 13, got 13"),
        (lose_a_token, "live positions with a slot: expected 8, got 7"),
        (forget_a_holder, "holders of block 1: expected 1, got 2"),
        (hold_a_block_twice, "holders of block 2: expected 1, got 2"),
    ],
)
def test_inv_2_the_mapping_is_unique(world: Any, damage: Callable[[Any], None], words: str) -> None:
    invariants.check_unique_mapping(world.tables, world.pool)
    damage(world)
    with broken(2, words):
        invariants.check_unique_mapping(world.tables, world.pool)


# -- INV-3 -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("slot", [8, 20])
def test_inv_3_a_step_touches_no_slot_of_a_pending_copy(slot: int) -> None:
    pending = [Move(0, 8, 20)]
    invariants.check_visibility("a", [7, 9, 19, 21], pending)
    with broken(3, f"request 'a', slot {slot}: expected no pending copy"):
        invariants.check_visibility("a", [7, slot], pending)


# -- INV-4 -----------------------------------------------------------------------------------------------------------


def test_inv_4_a_plan_is_made_from_the_version_of_its_table(world: Any) -> None:
    table, plan = world.tables["a"], world.plan("evacuate", "a")
    invariants.check_plan(plan, table)
    with broken(4, "layout version: expected 1, got 0"):
        invariants.check_plan(replace(plan, layout_version=0), table)


def test_inv_4_one_plan_of_a_request_is_in_flight(world: Any) -> None:
    table, plan = world.tables["a"], world.plan("evacuate", "a")
    table.plan_in_flight = True
    with broken(4, "plans in flight: expected 0, got 1"):
        invariants.check_plan(plan, table)


def test_inv_4_an_evacuation_frees_a_block_net(world: Any) -> None:
    table, plan = world.tables["a"], world.plan("evacuate", "a")
    assert plan.num_blocks_gained == 1
    with broken(4, "blocks freed net: expected at least 1, got 0"):
        invariants.check_plan(replace(plan, new_block_ids=(5, 6)), table)


def without_the_last_move(plan: ReclamationPlan) -> ReclamationPlan:
    return replace(plan, moves=plan.moves[:-1])


def into_a_later_hole(plan: ReclamationPlan) -> ReclamationPlan:
    last = plan.moves[-1]
    return replace(plan, moves=(*plan.moves[:-1], last._replace(dst_slot=last.dst_slot + 1)))


def with_a_block_too_many(plan: ReclamationPlan) -> ReclamationPlan:
    return replace(plan, new_block_ids=(*plan.new_block_ids, 9))


@pytest.mark.parametrize("damage", [without_the_last_move, into_a_later_hole, with_a_block_too_many])
def test_inv_4_a_fill_leaves_the_layout_packed(
    world: Any, damage: Callable[[ReclamationPlan], ReclamationPlan]
) -> None:
    world.grow("b", 3)
    world.kill("b", [4, 5])
    table, plan = world.tables["a"], world.plan("fill", "a")
    invariants.check_plan(plan, table)
    with broken(4, "live words after a packed plan: expected .*15, 15.*, got"):
        invariants.check_plan(damage(plan), table)


# -- INV-5 -----------------------------------------------------------------------------------------------------------

LAUNCHES = {
    "a dead source": ((Move(4, 8, 40),), "source slot 8: expected live, got dead"),
    "a live destination": ((Move(7, 11, 4),), "destination slot 4: expected dead, got live"),
    "two moves into a slot": ((Move(7, 11, 40), Move(8, 12, 40)), "destination slot 40: expected named once"),
    "two moves out of a slot": ((Move(7, 11, 40), Move(7, 11, 41)), "source slot 11: expected named once"),
    "a block freed in this pass": ((Move(7, 11, 36),), "destination slot 36: expected a block not freed in this pass"),
}


@pytest.mark.parametrize(("moves", "words"), LAUNCHES.values(), ids=LAUNCHES)
def test_inv_5_the_moves_of_a_launch_may_run_in_any_order(world: Any, moves: tuple[Move, ...], words: str) -> None:
    plan = world.plan("evacuate", "a")
    invariants.check_launch([plan], world.tables, freed_in_pass=[9])
    with broken(5, words):
        invariants.check_launch([replace(plan, moves=moves)], world.tables, freed_in_pass=[9])


def test_inv_5_holds_over_all_plans_of_a_launch(world: Any) -> None:
    world.lay("c", "x... x... xxxx x")
    plans = [world.plan("evacuate", "a"), world.plan("evacuate", "c")]
    with broken(5, "request 'c', destination slot 36: expected named once"):  # both were made from one free list
        invariants.check_launch(plans, world.tables)


def test_inv_5_no_slot_is_source_and_destination(world: Any) -> None:
    plan = replace(world.plan("evacuate", "a"), moves=(Move(7, 11, 12), Move(8, 12, 40)))
    with broken(5, "destination slot 12: expected dead, got live"):
        invariants.check_launch([plan], world.tables)


# -- INV-6 -----------------------------------------------------------------------------------------------------------


def lose_a_free_block(world: Any) -> None:
    world.pool._free.popitem()


def free_a_held_block(world: Any) -> None:
    world.pool._free[2] = None


def fence_a_held_block(world: Any) -> None:
    world.pool._fences[2] = 1


def invent_a_block(world: Any) -> None:
    world.pool._free[99] = None


def free_the_null_block(world: Any) -> None:
    world.pool._free[0] = None


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lose_a_free_block, "block 16 among free, held and in flight: expected once, got 0 times"),
        (free_a_held_block, "block 2 among free, held and in flight: expected once, got 2 times"),
        (fence_a_held_block, "block 2 among free, held and in flight: expected once, got 2 times"),
        (invent_a_block, r"blocks outside the pool: expected none, got \[99\]"),
        (free_the_null_block, r"blocks outside the pool: expected none, got \[0\]"),
    ],
)
def test_inv_6_every_block_is_counted_once(world: Any, damage: Callable[[Any], None], words: str) -> None:
    invariants.check_accounting(world.tables, world.pool)
    damage(world)
    with broken(6, words):
        invariants.check_accounting(world.tables, world.pool)


# -- INV-7 -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("slot", [0, 4, 12, 24], ids=["null", "shared", "hashed", "free"])
def test_inv_7_only_a_private_block_is_written(world: Any, slot: int) -> None:
    world.pool.set_hashed(3, True)
    invariants.check_writes("a", [8, 11, 18], world.pool, 4)
    with broken(7, f"request 'a', block {slot // 4}: expected private to be written"):
        invariants.check_writes("a", [8, slot], world.pool, 4)


# -- INV-8 -----------------------------------------------------------------------------------------------------------


def miscount_live_tokens(table: Any) -> None:
    table.num_live_tokens += 1


def kill_without_the_word(table: Any) -> None:
    table._state[0] = 2


def clear_a_bit_alone(table: Any) -> None:
    table.live_words[0] &= ~1


@pytest.mark.parametrize("damage", [miscount_live_tokens, kill_without_the_word, clear_a_bit_alone])
def test_inv_8_live_is_computed_less_evicted(world: Any, damage: Callable[[Any], None]) -> None:
    table = world.tables["a"]
    invariants.check_counts(table)
    damage(table)
    with broken(8, "request 'a', live tokens"):
        invariants.check_counts(table)


def revive_in_the_counts_alone(world: Any) -> None:
    world.tables["a"]._state[4] = 0


@pytest.mark.parametrize(
    ("number", "damage"), [(2, revive_a_dead_token), (6, lose_a_free_block), (8, revive_in_the_counts_alone)]
)
def test_a_state_at_rest_is_checked_for_mapping_accounting_and_counts(
    world: Any, number: int, damage: Callable[[Any], None]
) -> None:
    damage(world)
    with broken(number):
        invariants.check_all(world.tables, world.pool)
