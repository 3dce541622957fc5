from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vtoken.invariants import check_launch, check_plan, check_writes
from vtoken.types import Move, cdiv

MakeWorld = Callable[..., Any]
Draw = Callable[..., str]


# -- private blocks alone --------------------------------------------------------------------------------------------


def test_tokens_of_leaving_blocks_go_into_the_holes_lowest_hole_first(make_world: MakeWorld, draw: Draw) -> None:
    world = make_world()
    table = world.lay("a", "x.xx xxx. .x.x xx")
    plan = world.reclaim("fill", "a")
    assert plan.moves == (Move(11, 15, 5), Move(12, 16, 11), Move(13, 17, 12))
    assert draw(table) == "0 11 2 3 | 4 5 6 12 | 13 9 _ _"
    assert (plan.freed_block_ids, plan.new_block_ids) == ((4,), ())
    world.check()


def test_a_full_layout_with_a_dead_last_token_moves_its_cursor_alone(make_world: MakeWorld, draw: Draw) -> None:
    world = make_world()
    table = world.lay("a", "xxxx xx.")
    plan = world.reclaim("fill", "a")
    assert (plan.moves, plan.freed_block_ids) == ((), ())
    assert draw(table) == "0 1 2 3 | 4 5 _ _"
    world.grow("a", 1)
    assert draw(table) == "0 1 2 3 | 4 5 7 _"
    world.check()


def test_the_fullest_blocks_are_kept_and_the_earlier_of_equals(make_world: MakeWorld, draw: Draw) -> None:
    world = make_world()
    table = world.lay("a", "x... xxx. .xx. ..xx xxx")
    plan = world.reclaim("fill", "a")
    assert plan.freed_block_ids == (1, 4)
    assert plan.moves == (Move(0, 4, 11), Move(14, 18, 12), Move(15, 19, 15))
    assert draw(table) == "4 5 6 0 | 14 9 10 15 | 16 17 18 _"
    world.check()


def test_a_dead_block_leaves_before_a_live_one(make_world: MakeWorld, draw: Draw) -> None:
    world = make_world()
    table = world.lay("a", "xxxx .... xxxx xx..")
    assert world.reclaim("fill", "a").moves == ()
    assert draw(table) == "0 1 2 3 | 8 9 10 11 | 12 13 _ _"
    world.check()


def test_nobody_left_means_no_block_left(make_world: MakeWorld) -> None:
    world = make_world()
    table = world.lay("a", ".... ...")
    plan = world.reclaim("fill", "a")
    assert (plan.moves, plan.freed_block_ids) == ((), (1, 2))
    assert (table.block_ids, table.cursor, table.is_packed) == ([], 0, True)
    world.grow("a", 2)
    world.check()


def test_a_packed_layout_needs_no_plan(make_world: MakeWorld) -> None:
    world = make_world()
    world.lay("a", "xxdx xx")
    assert world.plan("fill", "a") is None


def test_fill_needs_no_free_block(make_world: MakeWorld) -> None:
    world = make_world(num_blocks=4)
    world.lay("a", "x.x. x.x. xxxx")
    assert world.pool.num_free == 0
    assert world.reclaim("fill", "a").num_blocks_gained == 1
    world.check()


@given(st.lists(st.sampled_from("x.d"), min_size=1, max_size=48))
def test_fill_packs_with_the_fewest_moves_and_no_block(make_world: MakeWorld, marks: list[str]) -> None:
    world = make_world(num_blocks=cdiv(len(marks), 4) + 1)
    table = world.lay("a", "".join(marks))
    live = table.live_positions()
    doomed = table.next_doomed(99)
    plan = world.plan("fill", "a")
    assert (plan is None) == table.is_packed
    if plan is None:
        return
    check_plan(plan, table)
    check_launch([plan], world.tables)
    fullest = sorted(range(len(table.block_ids)), key=lambda i: (-table.live_words[i].bit_count(), i))
    kept = sorted(fullest[: cdiv(len(live), 4)])
    targets = [table.slot_at(4 * index + offset) for index in kept for offset in range(4)][: len(live)]
    assert [move.src_slot for move in plan.moves] == [slot for slot in table.live_slots() if slot not in targets]
    assert [move.dst_slot for move in plan.moves] == [slot for slot in targets if slot not in table.live_slots()]
    assert plan.freed_block_ids == tuple(b for i, b in enumerate(table.block_ids) if i not in kept)
    assert plan.new_block_ids == ()
    world.launch(plan)
    assert (table.is_packed, sorted(table.live_positions()), table.next_doomed(99)) == (True, live, doomed)
    assert len(table.block_ids) == cdiv(len(live), 4)
    world.check()
    assert world.plan("fill", "a") is None


# -- blocks that others hold, or that the prefix cache serves --------------------------------------------------------


def test_a_full_shared_block_stays_as_it_is(make_world: MakeWorld, draw: Draw) -> None:
    world = make_world()
    table = world.lay("a", "xxxx xxxx .xxx xx")
    world.fork_prefix("a", "b", 8)
    plan = world.reclaim("fill", "a")
    assert plan.moves == (Move(13, 17, 12),)
    assert draw(table) == "0 1 2 3 | 4 5 6 7 | 13 9 10 11 | 12 _ _ _"
    world.check()


def test_the_survivors_of_a_shared_block_are_copied_out(make_world: MakeWorld, draw: Draw) -> None:
    world = make_world()
    table = world.lay("a", "xxxx xxxx x")
    world.fork_prefix("a", "b", 8)
    world.kill("a", [1, 2])
    plan = world.reclaim("fill", "a")
    assert draw(table) == "4 5 6 7 | 8 0 3 _"
    assert (plan.freed_block_ids, plan.new_block_ids) == ((1,), ())
    assert draw(world.tables["b"]) == "0 1 2 3 | 4 5 6 7"
    world.check()


def test_copying_out_takes_a_block_where_the_private_ones_do_not_suffice(make_world: MakeWorld, draw: Draw) -> None:
    world = make_world()
    table = world.lay("a", "xxxx xxxx xx")
    world.fork_prefix("a", "b", 8)
    world.kill("a", [1, 6])
    plan = world.reclaim("fill", "a")
    assert plan.new_block_ids == (4,)
    assert draw(table) == "8 9 0 2 | 3 4 5 7"
    assert plan.num_blocks_gained == 1  # two of the table's blocks left it, though both are still held
    world.check()


def test_copying_out_waits_for_a_free_block(make_world: MakeWorld) -> None:
    world = make_world(num_blocks=4)
    world.lay("a", "xxxx xxxx xx")
    world.fork_prefix("a", "b", 8)
    world.kill("a", [1, 6])
    assert world.plan("fill", "a") is None
    world.finish("b")
    assert world.plan("fill", "a") is not None


def test_copying_out_waits_where_all_free_blocks_were_freed_in_this_pass(make_world: MakeWorld) -> None:
    world = make_world(num_blocks=5)
    world.lay("c", "x")
    world.lay("a", "xxxx xxxx xx")
    world.fork_prefix("a", "b", 8)
    world.kill("a", [1, 6])
    world.finish("c")
    assert world.pool.num_free == 1
    assert world.plan("fill", "a") is None
    world.advance()
    world.reclaim("fill", "a")
    world.check()


def test_a_partly_filled_block_before_one_that_stays_leaves_for_a_fresh_one(make_world: MakeWorld, draw: Draw) -> None:
    """Only the last block of a packed list may be partly filled."""
    world = make_world()
    table = world.lay("a", "x.x. xxxx")
    world.pool.set_hashed(2, True)
    plan = world.reclaim("fill", "a")
    assert (plan.freed_block_ids, plan.new_block_ids) == ((1,), (3,))
    assert draw(table) == "4 5 6 7 | 0 2 _ _"
    world.check()


def test_a_full_private_block_before_one_that_stays_stays_too(make_world: MakeWorld, draw: Draw) -> None:
    world = make_world()
    table = world.lay("a", "x.xx xxxx x")
    world.pool.set_hashed(2, True)
    world.reclaim("fill", "a")
    assert draw(table) == "0 8 2 3 | 4 5 6 7"
    assert table.cursor == 8
    world.grow("a", 1)
    world.check()


@st.composite
def shared_requests(draw: Callable[..., Any]) -> tuple[str, int, set[int]]:
    """A picture, blocks of its prefix to share before anybody dies, and indices of whole blocks to hash."""
    picture = "".join(draw(st.lists(st.sampled_from("xxx.d"), min_size=1, max_size=40)))
    num_whole = len(picture) // 4
    shared = draw(st.integers(0, num_whole))
    hashed = draw(st.sets(st.integers(0, num_whole - 1))) if num_whole else set()
    return picture, shared, hashed


@given(shared_requests(), st.integers(0, 12))
def test_fill_packs_whatever_is_shared_or_hashed(
    make_world: MakeWorld, request_parts: tuple[str, int, set[int]], num_spare: int
) -> None:
    picture, shared, hashed = request_parts
    world = make_world(num_blocks=cdiv(len(picture), 4) + num_spare + 1)
    table = world.lay("a", "x" * len(picture))
    if shared:
        world.fork_prefix("a", "b", shared * 4)
    world.kill("a", [i for i, mark in enumerate(picture) if mark == "."])
    world.doom("a", [i for i, mark in enumerate(picture) if mark == "d"])
    for index in hashed:
        world.pool.set_hashed(table.block_ids[index], True)
    plan = world.plan("fill", "a")
    if table.is_packed:
        assert plan is None
        return

    blocks, words, live = list(table.block_ids), list(table.live_words), table.live_positions()
    private = [i for i, block in enumerate(blocks) if world.pool.is_private(block)]
    staying = [i for i in range(len(blocks)) if i not in private and words[i] == 0b1111]
    num_left = len(live) - 4 * len(staying)
    kept = sorted(sorted(private, key=lambda i: (-words[i].bit_count(), i))[: cdiv(num_left, 4)])
    if num_left % 4 and len(kept) == cdiv(num_left, 4) and staying and kept[-1] < staying[-1]:
        kept.pop()
    num_fresh = cdiv(num_left, 4) - len(kept)
    if num_fresh > num_spare:
        assert plan is None
        return

    check_plan(plan, table)
    check_launch([plan], world.tables)
    check_writes("a", {m.dst_slot for m in plan.moves if m.dst_slot // 4 not in plan.new_block_ids}, world.pool, 4)
    assert len(plan.new_block_ids) == num_fresh
    assert num_fresh == 0 or len(private) < len(blocks)
    assert set(plan.freed_block_ids) == {blocks[i] for i in range(len(blocks)) if i not in (*kept, *staying)}
    targets = [4 * block + o for block in (*(blocks[i] for i in kept), *plan.new_block_ids) for o in range(4)][
        :num_left
    ]
    stay_put = {*targets, *(4 * blocks[i] + o for i in staying for o in range(4))}
    movers = [slot for slot in table.live_slots() if slot not in stay_put]
    assert [move.src_slot for move in plan.moves] == movers
    assert [move.dst_slot for move in plan.moves] == [slot for slot in targets if slot not in set(table.live_slots())]
    world.launch(plan)
    assert table.is_packed
    assert sorted(table.live_positions()) == live
    assert [block for block in table.block_ids if block in blocks] == [b for b in blocks if b in table.block_ids]
    world.check()
    if table.num_blocks_needed(1) <= world.pool.num_free:
        world.grow("a", 1)
        world.check()


@pytest.mark.parametrize("num_live", range(17))
def test_a_request_holds_ceil_live_over_block_size_blocks_and_the_pool_has_the_rest(
    make_world: MakeWorld, num_live: int
) -> None:
    world = make_world()
    table = world.lay("a", "x" * 16)
    world.kill("a", [(i * 5) % 16 for i in range(16 - num_live)])
    if not table.is_packed:
        world.reclaim("fill", "a")
    assert len(table.block_ids) == cdiv(num_live, 4)
    assert world.pool.num_free == 16 - cdiv(num_live, 4)
    world.check()
