"""Recycles in a request's table: a new token goes into the slot of a doomed one (SPEC C-1 to C-3)."""

from collections.abc import Callable
from typing import Any

import pytest

from vtoken.errors import SpecError
from vtoken.request_table import RequestTable

Draw = Callable[[RequestTable], str]


def make_table(num_tokens: int, block_ids: list[int], block_size: int = 4) -> RequestTable:
    table = RequestTable("a", block_size)
    table.sync_new_tokens(block_ids, num_tokens)
    return table


def test_a_recycled_slot_is_the_slot_in_the_table(draw: Draw) -> None:
    table = make_table(6, [7, 5])
    table.doom([1, 4])
    assert table.recycle(1, 6) == 29  # where the KV is written
    assert draw(table) == "0 6 2 3 | 4 5 _ _"
    assert (table.table_slot_of(6), table.position_at(1)) == (1, 6)
    assert not table.is_live(1)


def test_a_recycle_adds_no_block_and_keeps_live_count_and_cursor() -> None:
    table = make_table(8, [7, 5])
    table.doom([1, 4])
    for new_position in (8, 9):
        table.recycle(table.next_doomed(1)[0], new_position)
    assert (table.block_ids, table.cursor, table.num_live_tokens, table.is_packed) == ([7, 5], 8, 8, True)
    assert (table.num_computed_tokens, table.num_evicted_tokens, table.num_doomed_tokens) == (10, 2, 0)


def test_recency_goes_by_position_whatever_the_slot() -> None:
    table = make_table(8, [7, 5])
    table.doom([1])
    table.recycle(1, 8)
    assert table.candidates() == [0, 2, 3, 4, 5, 6, 7, 8]
    assert table.live_positions() == [0, 8, 2, 3, 4, 5, 6, 7]


@pytest.mark.parametrize(
    ("victim", "new_position", "message"),
    [
        (0, 6, "position 0 of request 'a' is not doomed"),
        (2, 6, "position 2 of request 'a' is not doomed"),
        (6, 6, "position 6 of request 'a' is not computed"),
        (1, 7, "writes position 6 next, not 7: recycle serves single-token steps only"),
        (1, 5, "writes position 6 next, not 5"),
    ],
)
def test_a_wrong_recycle_is_refused_and_changes_nothing(
    state_of: Callable[..., Any], victim: int, new_position: int, message: str
) -> None:
    table = make_table(6, [7, 5])
    table.doom([1])
    table.evict_token(2)
    before = state_of(table)
    with pytest.raises(SpecError, match=message):
        table.recycle(victim, new_position)
    assert state_of(table) == before


def test_nothing_is_recycled_while_a_plan_is_in_flight() -> None:
    table = make_table(6, [7, 5])
    table.doom([1])
    table.plan_in_flight = True
    with pytest.raises(SpecError, match="has a plan in flight: kill the victim and append"):
        table.recycle(1, 6)
    table.plan_done()
    table.recycle(1, 6)


@pytest.mark.parametrize("prune", [False, True])
def test_a_recycle_taken_back_leaves_no_trace(state_of: Callable[..., Any], prune: bool) -> None:
    table = make_table(6, [7, 5])
    table.doom([4, 1])
    before = state_of(table)
    table.recycle(4, 6)
    if prune:
        assert table.next_doomed(1) == [1]
    assert table.rollback_recycle() == 4
    assert state_of(table) == before
    assert table.next_doomed(2) == [4, 1]


def test_recycles_in_a_row_are_the_same_as_one_after_another(state_of: Callable[..., Any]) -> None:
    tables = [make_table(9, [7, 5, 6]) for _ in range(2)]
    for table in tables:
        table.evict_tokens([3])
        table.doom([4, 1, 0, 8])
    for victim, position in ((4, 9), (1, 10), (0, 11)):
        tables[0].recycle(victim, position)
    tables[1].recycle_next(3)
    assert state_of(tables[1]) == state_of(tables[0])
    assert [table.rollback_recycle() for table in tables] == [0, 0]
    assert state_of(tables[1]) == state_of(tables[0])
    tables[1].recycle_next(0)
    assert tables[1].next_doomed(9) == [0, 8]


def test_recycles_in_a_row_need_as_many_doomed_tokens_and_no_plan_in_flight(state_of: Callable[..., Any]) -> None:
    table = make_table(6, [7, 5])
    table.doom([4, 1])
    before = state_of(table)
    with pytest.raises(SpecError, match="request 'a' has 2 doomed tokens to recycle, 3 are asked"):
        table.recycle_next(3)
    table.plan_in_flight = True
    with pytest.raises(SpecError, match="plan in flight: True"):
        table.recycle_next(2)
    table.plan_in_flight = False
    assert state_of(table) == before


def test_slots_of_positions_are_where_the_tokens_lie_now() -> None:
    table = make_table(6, [7, 5])
    table.doom([4, 1])
    table.recycle_next(1)
    assert table.slots_of([6, 1, 5]) == [20, 29, 21] == [table.slot_at(table.table_slot_of(p)) for p in (6, 1, 5)]


def test_the_victim_of_a_recycle_taken_back_is_first_in_the_queue_wherever_it_was() -> None:
    table = make_table(6, [7, 5])
    table.doom([4, 1, 0])
    table.recycle(1, 6)
    table.rollback_recycle()
    assert table.next_doomed(3) == [1, 4, 0]


def test_a_recycle_is_taken_back_where_a_plan_has_moved_it(make_world: Callable[..., Any], draw: Draw) -> None:
    world = make_world()
    table = world.lay("a", "x... .... xdxx")
    table.recycle(9, 12)
    table.apply_plan(world.plan("fill", "a"))
    assert draw(table) == "0 12 10 11 | 8 _ _ _"
    table.rollback_recycle()
    assert draw(table) == "0 9 10 11 | 8 _ _ _"
    assert table.table_slot_of(9) == 1
    assert table.is_doomed(9)


@pytest.mark.parametrize(
    "change",
    [
        lambda table: table.sync_new_tokens([7, 5], 8),
        lambda table: table.evict_token(6),
        lambda table: table.doom([6]),
        lambda table: table.rollback_recycle(),
    ],
)
def test_a_recycle_can_be_taken_back_once_and_not_after_the_next_change(
    change: Callable[[RequestTable], object],
) -> None:
    table = make_table(6, [7, 5])
    table.doom([1])
    table.recycle(1, 6)
    change(table)
    with pytest.raises(SpecError, match="rollback_recycle: request 'a' has no recycle to take back"):
        table.rollback_recycle()


def test_a_wrong_call_does_not_make_a_recycle_certain() -> None:
    table = make_table(6, [7, 5])
    table.doom([1])
    table.recycle(1, 6)
    with pytest.raises(SpecError):
        table.evict_token(99)
    table.evict_token(1)  # dead already: nothing changes
    table.sync_new_tokens([7, 5], 7)  # nothing new
    assert table.rollback_recycle() == 1
