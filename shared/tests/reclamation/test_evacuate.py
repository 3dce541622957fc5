from collections.abc import Callable
from itertools import accumulate
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vtoken.errors import SpecError
from vtoken.invariants import check_launch, check_plan
from vtoken.reclamation import EvacuatePlanner
from vtoken.types import Move, cdiv

MakeWorld = Callable[..., Any]
Draw = Callable[..., str]


def test_live_tokens_of_emptying_blocks_go_in_order_into_fresh_ones(make_world: MakeWorld, draw: Draw) -> None:
    world = make_world()
    table = world.lay("a", "x..x xxx. .x.. ..x. xx")
    plan = world.reclaim("evacuate", "a")
    assert plan.moves == (Move(0, 4, 24), Move(3, 7, 25), Move(9, 13, 26), Move(14, 18, 27))
    assert (plan.freed_block_ids, plan.new_block_ids) == ((1, 3, 4), (6,))
    assert draw(table) == "4 5 6 . | 0 3 9 14 | 16 17 _ _"
    world.check()


def test_a_dead_block_is_a_source_that_needs_no_target(make_world: MakeWorld) -> None:
    world = make_world(num_blocks=4)
    world.lay("a", "xxxx .... x")
    plan = world.reclaim("evacuate", "a")
    assert (plan.moves, plan.freed_block_ids, plan.new_block_ids) == ((), (2,), ())
    world.check()


@pytest.mark.parametrize("picture", ["x.x. x", "xx.. xxx. x", "xxx. xxx. x...", "xx.. xxxx xxxx"])
def test_nothing_is_planned_where_as_many_blocks_are_needed_as_are_freed(make_world: MakeWorld, picture: str) -> None:
    world = make_world()
    world.lay("a", picture)
    assert world.plan("evacuate", "a") is None


@pytest.mark.parametrize(("utilization", "sources"), [(0.0, 1), (0.25, 2), (0.5, 3), (0.74, 3), (0.75, 4)])
def test_sources_are_at_most_as_full_as_asked(make_world: MakeWorld, utilization: float, sources: int) -> None:
    world = make_world()
    table = world.lay("a", ".... x... xx.. xxx. xxxx xxxx")
    assert len(EvacuatePlanner(utilization).source_counts(table, world.pool)) == sources


@pytest.mark.parametrize("utilization", [-0.1, 1, 1.5])
def test_full_blocks_are_no_sources(utilization: float) -> None:
    with pytest.raises(SpecError, match=f"source_utilization={utilization}: give a share of at least 0 and below 1"):
        EvacuatePlanner(utilization)


def test_the_tail_block_is_never_a_source(make_world: MakeWorld) -> None:
    world = make_world()
    table = world.lay("a", "xxxx .... ....")
    assert EvacuatePlanner().source_counts(table, world.pool) == {1: 0}


@pytest.mark.parametrize("protect", ["share", "hash"])
def test_shared_and_hashed_blocks_are_no_sources(make_world: MakeWorld, protect: str) -> None:
    world = make_world()
    table = world.lay("a", "xxxx xxxx xxxx x")
    if protect == "share":
        world.fork_prefix("a", "b", 4)
    else:
        world.pool.set_hashed(1, True)
    world.kill("a", [0, 1, 2, 4, 5, 6, 8, 9, 10])
    assert EvacuatePlanner().source_counts(table, world.pool) == {1: 1, 2: 1}


def test_few_free_blocks_serve_the_emptiest_sources(make_world: MakeWorld, draw: Draw) -> None:
    world = make_world(num_blocks=9)
    table = world.lay("a", "xx.. x... xx.. x... xx.. x... xx")
    assert world.pool.num_free == 1
    plan = world.reclaim("evacuate", "a")
    assert plan.freed_block_ids == (2, 4, 6)  # 1 + 1 + 1 live; the first of two would be the fifth
    assert draw(table) == "0 1 . . | 8 9 . . | 16 17 . . | 4 12 20 . | 24 25 _ _"
    world.check()


def test_chosen_sources_keep_the_order_of_the_list(make_world: MakeWorld) -> None:
    world = make_world(num_blocks=7)
    world.lay("a", "xx.. .... x... xx.. xx")
    plan = world.reclaim("evacuate", "a")
    assert plan.freed_block_ids == (1, 2, 3)
    assert [move.position for move in plan.moves] == [0, 1, 8]


def test_among_equally_empty_sources_the_earlier_goes_first(make_world: MakeWorld) -> None:
    world = make_world(num_blocks=7)
    world.lay("a", "xx.. xx.. xx.. xx.. xx")
    assert world.reclaim("evacuate", "a").freed_block_ids == (1, 2)


def test_without_a_free_block_only_dead_sources_are_left(make_world: MakeWorld) -> None:
    world = make_world(num_blocks=5)
    world.lay("a", "x... .... x... xx")
    assert world.pool.num_free == 0
    assert world.reclaim("evacuate", "a").freed_block_ids == (2,)
    assert world.plan("evacuate", "a") is None  # its own block was freed in this pass
    world.advance()
    assert world.plan("evacuate", "a").freed_block_ids == (1, 3)


@given(
    st.lists(st.sampled_from("x...d"), min_size=9, max_size=60),
    st.integers(0, 6),
    st.sampled_from([0.0, 0.25, 0.5, 0.75]),
    st.sets(st.integers(0, 14)),
)
def test_evacuate_frees_a_block_net_keeps_order_and_leaves_the_tail_alone(
    make_world: MakeWorld, marks: list[str], num_spare: int, utilization: float, hashed: set[int]
) -> None:
    world = make_world(num_blocks=cdiv(len(marks), 4) + num_spare + 1)
    table = world.lay("a", "".join(marks))
    for index in hashed & set(range(len(marks) // 4)):
        world.pool.set_hashed(table.block_ids[index], True)
    blocks, words, live = list(table.block_ids), list(table.live_words), table.live_positions()

    counts = {
        i: word.bit_count()
        for i, word in enumerate(words[:-1])
        if word.bit_count() <= utilization * 4 and world.pool.is_private(blocks[i])
    }
    if cdiv(sum(counts.values()), 4) > num_spare:
        emptiest = sorted(counts, key=lambda i: (counts[i], i))
        sums = accumulate(counts[i] for i in emptiest)
        counts = {i: counts[i] for i, total in zip(emptiest, sums, strict=True) if cdiv(total, 4) <= num_spare}
    num_targets = cdiv(sum(counts.values()), 4)

    plan = world.plan(EvacuatePlanner(utilization), "a")
    assert (plan is None) == (len(counts) <= num_targets)
    if plan is None:
        return
    check_plan(plan, table)
    check_launch([plan], world.tables)
    sources = [blocks[i] for i in sorted(counts)]
    assert plan.freed_block_ids == tuple(sources)
    assert len(plan.new_block_ids) == num_targets
    assert plan.num_blocks_gained >= 1
    assert [move.src_slot for move in plan.moves] == [slot for slot in table.live_slots() if slot // 4 in sources]
    fresh_slots = [4 * block + o for block in plan.new_block_ids for o in range(4)]
    assert [move.dst_slot for move in plan.moves] == fresh_slots[: len(plan.moves)]

    tail_state = (table.block_ids[-1], table.live_words[-1], table.cursor % 4, table.cursor == 4 * len(blocks))
    world.launch(plan)
    assert (table.block_ids[-1], table.live_words[-1], table.cursor % 4, table.cursor == 4 * len(table.block_ids)) == (
        tail_state
    )
    kept = [block for block in blocks[:-1] if block not in sources]
    assert table.block_ids == [*kept, *plan.new_block_ids, blocks[-1]]
    carried = [move.position for move in plan.moves]
    assert carried == sorted(carried)
    assert [position for position in table.live_positions() if position in set(carried)] == carried
    assert sorted(table.live_positions()) == live
    world.check()
    if table.num_blocks_needed(3) <= world.pool.num_free:
        world.grow("a", 3)
        world.check()
