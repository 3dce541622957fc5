from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from vtoken.errors import SpecError
from vtoken.reclamation import ReclamationPlan
from vtoken.request_table import RequestTable
from vtoken.table_layout import TableLayout
from vtoken.types import Move


@pytest.fixture
def table(make_world: Callable[..., Any]) -> RequestTable:
    """Blocks 1 to 3: ``0 . 2 . | . . 6 7 | 8 9 _ _``."""
    return make_world().lay("a", "x.x. ..xx xx")


def plan_of(table: RequestTable, **parts: Any) -> ReclamationPlan:
    made_from = {
        "req_id": "a",
        "layout_version": table.layout_version,
        "liveness_version": table.liveness_version,
        "num_live_tokens": table.num_live_tokens,
    }
    return ReclamationPlan(**{**made_from, "moves": (), "freed_block_ids": (), **parts})


# -- reading ---------------------------------------------------------------------------------------------------------


def test_an_empty_layout_holds_nothing_and_is_packed() -> None:
    layout = TableLayout("a", 4)
    assert (layout.block_ids, layout.cursor, layout.num_live_tokens, layout.fragmentation) == ([], 0, 0, 0.0)
    assert layout.is_packed


def test_live_tokens_are_listed_in_physical_order(table: RequestTable) -> None:
    assert list(table.live_table_slots()) == [0, 2, 6, 7, 8, 9]
    assert table.live_slots() == [4, 6, 10, 11, 12, 13]
    assert table.live_positions() == [0, 2, 6, 7, 8, 9]
    assert list(table.live_words) == [0b0101, 0b1100, 0b0011]


def test_position_and_slot_are_two_numbers(table: RequestTable) -> None:
    assert (table.table_slot_of(6), table.position_at(6), table.slot_at(6)) == (6, 6, 10)


def test_a_dead_token_keeps_its_last_place(table: RequestTable) -> None:
    assert not table.is_live(5)
    assert table.table_slot_of(5) == 5


@pytest.mark.parametrize("position", [-1, 10])
def test_a_position_that_is_not_computed_is_refused_by_name(table: RequestTable, position: int) -> None:
    with pytest.raises(SpecError, match=f"position {position} of request 'a' is not computed yet: it has 10 tokens"):
        table.table_slot_of(position)


def test_fragmentation_is_the_share_of_held_slots_that_are_not_live(table: RequestTable) -> None:
    assert table.fragmentation == 0.5  # 6 of 12


def test_an_append_asks_for_a_block_when_the_cursor_leaves_the_last_one_whatever_the_holes(table: RequestTable) -> None:
    assert [table.num_blocks_needed(n) for n in (0, 1, 2, 3, 6, 7)] == [0, 0, 0, 1, 1, 2]


def test_full_blocks_without_a_hole_ask_for_a_block(make_world: Callable[..., Any]) -> None:
    assert make_world().lay("a", "xxxx xxxx").num_blocks_needed(1) == 1


def test_a_layout_is_packed_if_live_tokens_fill_its_first_slots(make_world: Callable[..., Any]) -> None:
    world = make_world()
    assert world.lay("a", "xxxx xx").is_packed
    assert not world.lay("b", "x.xx xx").is_packed
    assert not world.lay("c", "xxxx x.").is_packed  # the cursor does not follow the last live token
    assert not world.lay("d", "....").is_packed  # a block is held beyond them


def test_blocks_of_more_than_64_slots_have_words_of_their_own_length(make_world: Callable[..., Any]) -> None:
    world = make_world(block_size=128, num_blocks=5)
    table = world.lay("a", "x" * 127 + "." + "x" * 100)
    assert list(table.live_words) == [2**127 - 1, 2**100 - 1]
    world.reclaim("fill", "a")
    assert list(table.live_words) == [2**128 - 1, 2**99 - 1]
    assert table.position_at(127) == 227
    world.check()


# -- refusals --------------------------------------------------------------------------------------------------------

REFUSALS = {
    "of another request": ({"req_id": "b"}, "plan of request 'b' was handed to request 'a'"),
    "of another layout": ({"layout_version": 99}, "INV-4: the plan .* was made at"),
    "that frees a block twice": ({"freed_block_ids": (1, 1)}, "names a block twice"),
    "that frees and adds a block": ({"freed_block_ids": (1,), "new_block_ids": (1,)}, "names a block twice"),
    "that frees a block of others": ({"freed_block_ids": (9,)}, "frees block 9, which request 'a' does not hold"),
    "that adds a held block": ({"new_block_ids": (2,)}, "adds block 2, which request 'a' holds already"),
    "that frees the tail block": ({"freed_block_ids": (3,)}, "frees the tail block 3"),
    "that strands live tokens": ({"freed_block_ids": (1, 2)}, r"INV-1: .* frees blocks \[1, 2\] with live tokens"),
    "whose source is a hole": ({"moves": (Move(1, 5, 40),), "new_block_ids": (10,)}, "from slot 5: not live there"),
    "whose source is not held": ({"moves": (Move(0, 36, 40),), "new_block_ids": (10,)}, "from slot 36: not live"),
    "whose source is no slot": ({"moves": (Move(0, -1, 40),), "new_block_ids": (10,)}, "from slot -1: not live"),
    "whose position is elsewhere": ({"moves": (Move(6, 4, 40),), "new_block_ids": (10,)}, "position 6 .* from slot 4"),
    "whose destination is live": ({"moves": (Move(9, 13, 4),), "packed": True}, "INV-5: .* to slot 4: no hole"),
    "whose destination is unknown": ({"moves": (Move(9, 13, 36),), "packed": True}, "to slot 36: no hole"),
    "into the null block": ({"moves": (Move(9, 13, 0),), "packed": True}, "to slot 0: no hole"),
    "into a block that leaves": (
        {"moves": (Move(9, 13, 5), Move(0, 4, 8), Move(2, 6, 9)), "freed_block_ids": (1,), "packed": True},
        "position 9 to slot 5: no hole",
    ),
    "that fills a hole without packing": ({"moves": (Move(9, 13, 5),)}, "INV-5: .* to slot 5: no hole"),
    "with one source twice": (
        {"moves": (Move(0, 4, 40), Move(0, 4, 41)), "new_block_ids": (10,)},
        "INV-5: .* names slot 4 or 41 twice",
    ),
    "with one destination twice": (
        {"moves": (Move(0, 4, 40), Move(2, 6, 40)), "new_block_ids": (10,)},
        "INV-5: .* names slot 6 or 40 twice",
    ),
}


@pytest.mark.parametrize(("parts", "message"), REFUSALS.values(), ids=REFUSALS)
def test_a_plan_is_refused_and_changes_nothing(
    table: RequestTable, state_of: Callable[..., Any], parts: dict[str, Any], message: str
) -> None:
    before = state_of(table)
    with pytest.raises(SpecError, match=message):
        table.apply_plan(plan_of(table, **parts))
    assert state_of(table) == before


def test_only_one_plan_of_a_request_is_in_flight(make_world: Callable[..., Any]) -> None:
    world = make_world(regime="fenced")
    table = world.lay("a", "x.x. .... xxxx xx")
    world.reclaim("release", "a")
    with pytest.raises(SpecError, match="INV-4: request 'a' has a plan in flight"):
        table.check_plan(plan_of(table))
    table.plan_done()
    table.check_plan(plan_of(table))


@pytest.mark.parametrize("planner", ["fill", "evacuate", "release"])
def test_a_plan_is_refused_once_the_block_list_has_changed(make_world: Callable[..., Any], planner: str) -> None:
    world = make_world()
    table = world.lay("a", "x.x. x... .... xxxx")
    plan = world.plan(planner, "a")
    world.grow("a", 1)
    with pytest.raises(SpecError, match="INV-4"):
        table.apply_plan(plan)


@pytest.mark.parametrize(("planner", "is_refused"), [("fill", True), ("evacuate", False), ("release", False)])
def test_a_packed_plan_alone_is_refused_after_an_append_into_a_held_block(
    make_world: Callable[..., Any], planner: str, is_refused: bool
) -> None:
    world = make_world()
    table = world.lay("a", "x.x. x... .... xx")
    plan = world.plan(planner, "a")
    world.grow("a", 1)
    if is_refused:
        with pytest.raises(SpecError, match="INV-4"):
            world.launch(plan)
    else:
        world.launch(plan)
        assert table.live_positions()[-1] == 14
    world.check()


@pytest.mark.parametrize("planner", ["fill", "evacuate"])
def test_a_plan_is_refused_once_a_token_that_it_carries_is_dead(make_world: Callable[..., Any], planner: str) -> None:
    world = make_world()
    world.lay("a", "xx.. x... .... x...")
    plan = world.plan(planner, "a")
    world.kill("a", [plan.moves[0].position])
    with pytest.raises(SpecError, match=r"INV-4|not live there"):
        world.launch(plan)
    world.check()


def test_a_plan_is_refused_once_a_token_that_it_carries_was_written_over(make_world: Callable[..., Any]) -> None:
    world = make_world()
    world.lay("a", "xx.. d... .... xxxx")
    plan = world.plan("evacuate", "a")
    assert [move.position for move in plan.moves] == [0, 1, 4]
    world.recycle_next("a")
    with pytest.raises(SpecError, match="position 4 of request 'a' from slot 8: not live there"):
        world.launch(plan)
    world.check()


# -- commits ---------------------------------------------------------------------------------------------------------


def test_fill_moves_the_cursor_behind_the_last_live_token(
    make_world: Callable[..., Any], draw: Callable[[RequestTable], str]
) -> None:
    world = make_world()
    table = world.lay("a", "x.x. ..xx xx")
    world.reclaim("fill", "a")
    assert draw(table) == "0 6 2 7 | 8 9 _ _"
    assert (table.cursor, table.block_ids, table.is_packed) == (6, [1, 2], True)


def test_evacuate_puts_its_blocks_before_the_tail_and_leaves_the_cursor_in_the_tail(
    make_world: Callable[..., Any], draw: Callable[[RequestTable], str]
) -> None:
    world = make_world()
    table = world.lay("a", "x.x. ...x xxxx xx")
    world.reclaim("evacuate", "a")
    assert draw(table) == "8 9 10 11 | 0 2 7 . | 12 13 _ _"
    assert (table.cursor, table.block_ids) == (10, [3, 5, 4])
    world.grow("a", 1)
    assert draw(table) == "8 9 10 11 | 0 2 7 . | 12 13 14 _"


def test_release_shifts_what_lies_behind_a_freed_block(
    make_world: Callable[..., Any], draw: Callable[[RequestTable], str]
) -> None:
    world = make_world()
    table = world.lay("a", ".... x..x .... ....")
    world.reclaim("release", "a")
    assert draw(table) == "4 . . 7 | . . . ."
    assert (table.cursor, table.block_ids) == (8, [2, 4])
    assert table.table_slot_of(7) == 3


def test_a_kill_follows_a_token_to_where_a_launched_plan_puts_it(
    make_world: Callable[..., Any], draw: Callable[[RequestTable], str]
) -> None:
    world = make_world(regime="fenced")
    table = world.lay("a", "x.x. ..xx xx")
    world.reclaim("fill", "a")
    world.kill("a", [9])
    assert draw(table) == "0 6 2 7 | 8 . _ _"
    world.check()


def test_a_doomed_token_is_carried_and_stays_doomed(make_world: Callable[..., Any]) -> None:
    world = make_world()
    table = world.lay("a", "x... .... .d")
    world.reclaim("fill", "a")
    assert table.live_positions() == [0, 9]
    assert (table.is_doomed(9), table.next_doomed(1)) == (True, [9])


def test_a_plan_raises_the_layout_version_and_no_other(table: RequestTable) -> None:
    before = (table.layout_version, table.liveness_version)
    table.apply_plan(plan_of(table, moves=(Move(0, 4, 40), Move(2, 6, 41)), freed_block_ids=(1,), new_block_ids=(10,)))
    assert (table.layout_version, table.liveness_version) == (before[0] + 1, before[1])


def test_a_plan_keeps_counts_and_live_positions(table: RequestTable) -> None:
    before = (table.num_computed_tokens, table.num_live_tokens, sorted(table.live_positions()))
    plan = plan_of(table, moves=(Move(0, 4, 40), Move(2, 6, 41)), freed_block_ids=(1,), new_block_ids=(10,))
    table.apply_plan(plan)
    assert (table.num_computed_tokens, table.num_live_tokens, sorted(table.live_positions())) == before


def test_a_used_plan_is_stale(table: RequestTable) -> None:
    plan = plan_of(table, moves=(Move(0, 4, 40), Move(2, 6, 41)), freed_block_ids=(1,), new_block_ids=(10,))
    table.apply_plan(plan)
    table.plan_done()
    with pytest.raises(SpecError, match="INV-4"):
        table.apply_plan(plan)
    with pytest.raises(SpecError, match="not hold"):
        table.apply_plan(replace(plan, layout_version=table.layout_version))


def test_a_plan_that_leaves_a_live_token_behind_the_cursor_is_refused(make_world: Callable[..., Any]) -> None:
    world = make_world()
    table = world.lay("a", "x.xx xxx. xx")
    plan = world.plan("fill", "a")
    assert [move.position for move in plan.moves] == [8, 9]
    kept_tail = world.lay("b", "x.xx xxxx x.xx")  # the dropped move starts in a block that stays
    short = replace(world.plan("fill", "b"), moves=())
    before = kept_tail.cursor, list(kept_tail.live_words)
    with pytest.raises(SpecError, match=r"INV-4: plan of request 'b' says that it packs 10 live tokens into 3 blocks"):
        kept_tail.apply_plan(short)
    assert (kept_tail.cursor, list(kept_tail.live_words)) == before
    few = replace(plan, moves=(), freed_block_ids=())
    with pytest.raises(
        SpecError, match=r"INV-4: plan of request 'a' says that it packs 8 live tokens into 2 blocks, it leaves 3"
    ):
        table.apply_plan(few)
