import random
import sys
from array import array
from collections.abc import Callable
from itertools import count
from typing import Any

import pytest

from vtoken.errors import SpecError
from vtoken.request_table import RequestTable
from vtoken.types import cdiv

Draw = Callable[[RequestTable], str]


def make_table(num_tokens: int, block_ids: list[int], block_size: int = 4) -> RequestTable:
    table = RequestTable("a", block_size)
    table.sync_new_tokens(block_ids, num_tokens)
    return table


# -- appends (T-2, T-5, T-6) -----------------------------------------------------------------------------------------


def test_new_tokens_take_the_slots_from_the_cursor_on(draw: Draw) -> None:
    table = make_table(3, [7])
    table.sync_new_tokens([7, 5, 9], 10)
    assert draw(table) == "0 1 2 3 | 4 5 6 7 | 8 9 _ _"
    assert table.live_slots() == [28, 29, 30, 31, 20, 21, 22, 23, 36, 37]
    assert (table.cursor, table.num_computed_tokens, table.num_live_tokens) == (10, 10, 10)


def test_the_same_call_twice_changes_nothing(state_of: Callable[..., Any]) -> None:
    table = make_table(6, [7, 5])
    before = state_of(table)
    table.sync_new_tokens([7, 5], 6)
    assert state_of(table) == before


def test_a_block_list_may_be_any_sequence(state_of: Callable[..., Any]) -> None:
    table = make_table(0, [])
    for block_ids, total_len in (((), 0), ((7,), 2), ((7,), 3), (array("i", [7, 5]), 6)):
        table.sync_new_tokens(block_ids, total_len)
    assert state_of(table) == state_of(make_table(6, [7, 5])) | {"layout_version": 2}


def test_blocks_may_come_before_their_tokens(draw: Draw) -> None:
    table = make_table(2, [7, 5, 9])
    assert draw(table) == "0 1 _ _ | _ _ _ _ | _ _ _ _"
    table.sync_new_tokens([7, 5, 9], 5)
    assert draw(table) == "0 1 2 3 | 4 _ _ _ | _ _ _ _"


@pytest.mark.parametrize(
    ("block_ids", "total_len", "message"),
    [
        ([7, 5], 5, "has 6 computed tokens, total_len=5 is less: preempt it"),
        ([7, 5], 9, "needs 3 blocks for total_len=9, block_ids has 2"),
        ([7], 6, r"do not extend its block list \(2 blocks known, 1 given\)"),
        ([7, 6], 7, "do not extend its block list"),
        ([7, 6, 9], 9, "do not extend its block list"),
        ([], 6, "do not extend its block list"),
    ],
)
def test_a_wrong_sync_is_refused_and_changes_nothing(
    state_of: Callable[..., Any], block_ids: list[int], total_len: int, message: str
) -> None:
    table = make_table(6, [7, 5])
    before = state_of(table)
    with pytest.raises(SpecError, match=message):
        table.sync_new_tokens(block_ids, total_len)
    assert state_of(table) == before


def test_an_append_never_goes_into_a_hole(draw: Draw) -> None:
    table = make_table(6, [7, 5])
    table.evict_tokens([1, 2, 5])
    table.sync_new_tokens([7, 5, 9], 9)
    assert draw(table) == "0 . . 3 | 4 . 6 7 | 8 _ _ _"


def test_positions_go_on_while_slots_start_behind_the_live_tokens(make_world: Callable[..., Any]) -> None:
    """Of 729 tokens 257 are kept: the next ones are positions 729 to 731 in table slots 257 to 259."""
    world = make_world(block_size=16, num_blocks=64)
    table = world.lay("a", "x" * 4 + "." * 472 + "x" * 253)
    world.reclaim("fill", "a")
    world.grow("a", 3)
    assert table.num_computed_tokens == 732
    assert [table.table_slot_of(position) for position in (729, 730, 731)] == [257, 258, 259]
    world.check()


def test_without_an_eviction_positions_are_those_of_the_plain_engine() -> None:
    table = RequestTable("a", 4)
    for total_len in range(1, 65):
        table.sync_new_tokens(list(range(1, cdiv(total_len, 4) + 1)), total_len)
        assert table.live_positions() == list(range(total_len))
        assert table.table_slot_of(total_len - 1) == total_len - 1


def test_versions_tell_places_from_liveness_and_an_append_into_a_held_block_from_both() -> None:
    table = make_table(6, [7, 5])
    versions = [(table.layout_version, table.liveness_version)]
    for call in (
        lambda: table.sync_new_tokens([7, 5], 7),  # a held block
        lambda: table.sync_new_tokens([7, 5, 9], 9),  # a new one
        lambda: table.doom([0, 1]),
        lambda: table.recycle(0, 9),
        lambda: table.evict_token(1),
        lambda: table.evict_token(1),  # dead already
        lambda: table.doom([]),
    ):
        call()
        versions.append((table.layout_version, table.liveness_version))
    assert versions == [(1, 0), (1, 0), (2, 0), (2, 1), (2, 1), (2, 2), (2, 2), (2, 2)]


# -- kills (T-3, T-8) ------------------------------------------------------------------------------------------------


def test_a_kill_moves_nothing_frees_nothing_and_leaves_the_cursor(draw: Draw) -> None:
    table = make_table(6, [7, 5])
    assert table.evict_tokens([4, 0, 5]) == [4, 0, 5]
    assert draw(table) == ". 1 2 3 | . . _ _"
    assert (table.cursor, table.block_ids, table.num_live_tokens, table.num_evicted_tokens) == (6, [7, 5], 3, 3)


def test_a_kill_is_idempotent_and_says_what_changed() -> None:
    table = make_table(6, [7, 5])
    assert table.evict_token(3)
    assert not table.evict_token(3)
    assert table.evict_tokens(iter([3, 4, 4, 5])) == [4, 5]
    assert table.num_live_tokens == 3


@pytest.mark.parametrize("positions", [[0, 6], [-1, 0], [2, 99, 1]])
@pytest.mark.parametrize("call", ["evict_tokens", "doom"])
def test_a_position_that_is_not_computed_is_refused_before_anything_dies(
    state_of: Callable[..., Any], positions: list[int], call: str
) -> None:
    table = make_table(6, [7, 5])
    before = state_of(table)
    with pytest.raises(SpecError, match="is not computed yet: it has 6 tokens"):
        getattr(table, call)(positions)
    assert state_of(table) == before


def test_a_kill_ends_a_doomed_token_at_once_and_takes_it_off_the_queue() -> None:
    table = make_table(6, [7, 5])
    table.doom([3, 1, 4])
    table.evict_token(1)
    table.evict_token(3)
    assert (table.num_doomed_tokens, table.next_doomed(9), table.next_doomed(1)) == (1, [4], [4])


# -- dooms (T-1, T-4) ------------------------------------------------------------------------------------------------


def test_a_doomed_token_is_live_everywhere_but_no_candidate() -> None:
    table = make_table(6, [7, 5])
    table.doom([4, 1])
    assert table.is_live(4)
    assert table.is_doomed(4)
    assert not table.is_doomed(0)
    assert (table.num_live_tokens, table.num_evicted_tokens, table.num_doomed_tokens) == (6, 0, 2)
    assert table.live_positions() == [0, 1, 2, 3, 4, 5]
    assert table.candidates() == [0, 2, 3, 5]


def test_doomed_tokens_are_queued_in_the_given_order() -> None:
    table = make_table(6, [7, 5])
    table.doom([4, 1])
    table.doom(iter([0]))
    assert [table.next_doomed(n) for n in (0, 1, 2, 3, 9)] == [[], [4], [4, 1], [4, 1, 0], [4, 1, 0]]


@pytest.mark.parametrize(
    ("positions", "message"),
    [([0, 1], "position 1 of request 'a' is doomed"), ([0, 2], "position 2 .* is dead"), ([0, 0], "named twice")],
)
def test_only_live_tokens_can_be_doomed_and_only_once(
    state_of: Callable[..., Any], positions: list[int], message: str
) -> None:
    table = make_table(6, [7, 5])
    table.doom([1])
    table.evict_token(2)
    before = state_of(table)
    with pytest.raises(SpecError, match=message):
        table.doom(positions)
    assert state_of(table) == before


# -- size (T-7) ------------------------------------------------------------------------------------------------------


def test_metadata_is_at_most_16_bytes_a_token_with_half_of_them_dead_and_a_batch_doomed() -> None:
    table, block_ids = RequestTable("a", 16), count(10_000)
    for total_len in range(64, 16_385, 64):
        new_blocks = [next(block_ids) for _ in range(table.num_blocks_needed(64))]
        table.sync_new_tokens([*table.block_ids, *new_blocks], total_len)
    victims = random.Random(0).sample(range(16_384), 8_192)
    table.evict_tokens(victims[64:])
    table.doom(victims[:64])
    parts = list(vars(table).values())
    numbers = [*table.block_ids, *table.next_doomed(64)]
    num_bytes = sum(map(sys.getsizeof, parts)) + sum(map(sys.getsizeof, numbers))
    assert num_bytes <= 16 * 16_384
