from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from vtoken.errors import PoolExhausted, SpecError
from vtoken.paged_executor import PagedExecutor

MakeWorld = Callable[..., Any]


# -- requests (Q) ----------------------------------------------------------------------------------------------------


def test_a_request_begins_with_nothing(make_world: MakeWorld) -> None:
    world = make_world()
    world.admit("a")
    seen = world.observe().requests["a"]
    assert (seen.block_ids, seen.live_words, seen.positions, seen.kv) == ((), (), (), ())
    assert seen.fingerprint == world.fingerprint("a") == "0" * 16


def test_the_end_of_a_request_gives_all_its_blocks_back(make_world: MakeWorld) -> None:
    world = make_world()
    for num_tokens in (1, 4, 5, 11):  # whole blocks or not
        for end in (world.finish, world.preempt):
            world.admit("a")
            world.grow("a", num_tokens)
            end("a")
            assert world.pool.num_free == 16
            world.check()


def test_a_request_rebuilt_after_preemption_starts_from_nothing(make_world: MakeWorld) -> None:
    world = make_world()
    world.lay("a", "x.d. xxx")
    world.preempt("a")
    table = world.lay("a", "xxxx xx")
    assert (table.num_evicted_tokens, table.num_doomed_tokens, table.num_computed_tokens) == (0, 0, 6)
    assert table.live_positions() == [0, 1, 2, 3, 4, 5]
    world.check()


def test_rows_are_used_again(make_world: MakeWorld) -> None:
    world = make_world(max_num_reqs=2)
    world.lay("a", "xx")
    world.lay("b", "xxx")
    with pytest.raises(SpecError, match="all 2 request rows are taken: raise max_num_reqs"):
        world.admit("c")
    world.finish("a")
    world.lay("c", "x.x")
    world.check()


def test_allocate_forgets_everything(make_world: MakeWorld) -> None:
    world = make_world()
    world.lay("a", "xx")
    world.allocate(replace(world.spec, num_blocks=5))
    assert not world.tables
    assert world.observe().free_block_ids == {1, 2, 3, 4}
    world.lay("a", "xxx")
    world.check()


def test_a_subclass_without_a_store_says_so(make_world: MakeWorld) -> None:
    with pytest.raises(NotImplementedError):
        PagedExecutor().allocate(make_world().spec)


# -- refusals change nothing (T-8, Q-5) ------------------------------------------------------------------------------

REFUSALS: dict[str, tuple[Callable[[Any], object], str]] = {
    "admit twice": (lambda w: w.admit("a"), "request 'a' is already admitted"),
    "append to nobody": (lambda w: w.append("z", 1, w.kv_of("a", 0)), "request 'z' is not in the token table"),
    "append nothing": (lambda w: w.append("a", 0, b""), "num_tokens=0: write at least one token"),
    "append half a token": (lambda w: w.append("a", 1, b"x"), "kv has 1 bytes, 1 tokens need 32"),
    "append too much": (lambda w: w.grow("a", 99), "25 blocks are needed, 12 of 16 are free"),
    "kill what is not computed": (lambda w: w.kill("a", [0, 10]), "position 10 of request 'a' is not computed"),
    "doom the dead": (lambda w: w.doom("a", [0, 1]), "position 1 of request 'a' is dead"),
    "recycle without a victim": (lambda w: w.recycle_next("b"), "request 'b' has no doomed token in a private slot"),
    "recycle half a token": (lambda w: w.recycle("a", b"x"), "kv has 1 bytes, 1 tokens need 32"),
    "fork from nobody": (lambda w: w.fork_prefix("z", "c", 4), "request 'z' is not in the token table"),
    "fork to an admitted request": (lambda w: w.fork_prefix("b", "a", 4), "request 'a' is already admitted"),
    "fork half a block": (lambda w: w.fork_prefix("b", "c", 3), "prefix of 3 tokens of request 'b'"),
    "finish nobody": (lambda w: w.finish("z"), "request 'z' is not in the token table"),
    "preempt nobody": (lambda w: w.preempt("z"), "request 'z' is not in the token table"),
    "ask for too many queries": (lambda w: w.attend("a", w.query(11), 11), "num_queries=11, request 'a' has 10"),
    "ask for no query": (lambda w: w.attend("a", b"", 0), "num_queries=0"),
    "ask with half a query": (lambda w: w.attend("a", b"1234", 1), "q has 4 bytes, 1 queries need 32"),
    "fingerprint nobody": (lambda w: w.fingerprint("z"), "request 'z' is not in the token table"),
}


@pytest.mark.parametrize(("call", "message"), REFUSALS.values(), ids=REFUSALS)
def test_a_refused_call_changes_nothing(make_world: MakeWorld, call: Callable[[Any], object], message: str) -> None:
    world = make_world()
    world.lay("a", "x.xx d.xx xx")
    world.lay("b", "xxxx")
    before = (world.observe(), world.pool.free_block_ids(), world.tables["a"].next_doomed(9))
    with pytest.raises(SpecError, match=message):
        call(world)
    assert (world.observe(), world.pool.free_block_ids(), world.tables["a"].next_doomed(9)) == before
    world.check()
    world.grow("b", 1)  # a row or block lost on the way would show here
    world.check()


def test_an_exhausted_pool_is_told_from_other_mistakes(make_world: MakeWorld) -> None:
    world = make_world(num_blocks=3)
    world.lay("a", "xxxx xxx")
    world.grow("a", 1)
    with pytest.raises(PoolExhausted):
        world.grow("a", 1)
    world.check()


# -- tokens ----------------------------------------------------------------------------------------------------------


def test_a_kill_says_what_it_changed(make_world: MakeWorld) -> None:
    world = make_world()
    world.lay("a", "xxxx xx")
    assert world.kill("a", [5, 0]) == [5, 0]
    assert world.kill("a", iter([0, 1])) == [1]
    assert world.kill("a", []) == []
    world.check()


def test_recycled_kv_is_written_where_the_table_says(make_world: MakeWorld) -> None:
    world = make_world()
    world.lay("a", "xdxx x")
    free = world.pool.num_free
    world.recycle_next("a")
    seen = world.observe().requests["a"]
    assert seen.positions == (0, 5, 2, 3, 4)
    assert seen.kv[1] == world.kv_of("a", 5)
    assert world.pool.num_free == free
    world.check()


@pytest.mark.parametrize("protect", ["share", "hash"])
def test_nothing_is_recycled_into_a_shared_or_hashed_block(make_world: MakeWorld, protect: str) -> None:
    world = make_world()
    table = world.lay("a", "xdxx x")
    if protect == "share":
        world.fork_prefix("a", "b", 4)
    else:
        world.pool.set_hashed(table.block_ids[0], True)
    with pytest.raises(SpecError, match="recycle: request 'a' has no doomed token in a private slot"):
        world.recycle_next("a")
    assert table.num_computed_tokens == 5
    world.check()


def test_reserved_slots_are_those_that_an_append_writes(make_world: MakeWorld) -> None:
    appended, reserved = make_world(), make_world()
    for num_tokens in (3, 1, 9):
        for world in (appended, reserved):
            world.lay(f"a{num_tokens}", "x.xd x")
        appended.grow(f"a{num_tokens}", num_tokens)
        table = reserved.tables[f"a{num_tokens}"]
        slots = reserved.reserve(f"a{num_tokens}", num_tokens)
        assert slots == [table.slot_at(index) for index in range(5, 5 + num_tokens)]
        seen, expected = reserved.observe(), appended.observe()
        assert seen.free_block_ids == expected.free_block_ids
        assert seen.requests[f"a{num_tokens}"].block_ids == expected.requests[f"a{num_tokens}"].block_ids
        assert seen.requests[f"a{num_tokens}"].live_words == expected.requests[f"a{num_tokens}"].live_words


def test_a_reserved_recycle_gives_the_victims_slot_and_writes_nothing(make_world: MakeWorld) -> None:
    world = make_world()
    table = world.lay("a", "xdxx dx")
    before = world.observe()
    assert world.reserve_recycled("a") == world.tables["a"].slot_at(1)
    assert (table.is_live(1), table.num_computed_tokens, table.num_live_tokens) == (False, 7, 6)
    assert world.observe() == before
    with pytest.raises(SpecError, match="num_tokens=0: write at least one token"):
        world.reserve("a", 0)
    with pytest.raises(PoolExhausted):
        world.reserve("a", 99)
    assert world.observe() == before
    assert world.row_of("a") == 0


# -- regimes (R-7, R-8) ----------------------------------------------------------------------------------------------


def test_blocks_freed_in_order_serve_the_same_pass_but_no_copy(make_world: MakeWorld) -> None:
    world = make_world(num_blocks=5)
    world.lay("a", ".... .... .... x")
    ticket_plan = world.plan("release", "a")
    ticket = world.launch(ticket_plan)
    assert (ticket.req_id, ticket.num_moves, ticket.fenced_block_ids) == ("a", 0, ())
    assert world.pool.num_free == 3
    assert world.pool.copy_targets(1) is None
    world.lay("b", "xxxx xxxx xxxx")
    world.check()


def test_fenced_blocks_wait_for_an_advance_and_a_reap(make_world: MakeWorld) -> None:
    world = make_world(num_blocks=5, regime="fenced")
    world.lay("a", ".... .... .... x")
    ticket = world.launch(world.plan("release", "a"))
    assert ticket.fenced_block_ids == (1, 2, 3)
    assert world.reap() == []
    assert (world.pool.num_free, world.pool.num_in_flight) == (0, 3)
    world.admit("b")
    with pytest.raises(PoolExhausted, match="3 in flight"):
        world.grow("b", 1)
    world.advance()
    with pytest.raises(PoolExhausted):
        world.grow("b", 1)
    assert world.reap() == [1, 2, 3]
    world.grow("b", 12)
    world.check()


def test_a_plan_is_in_flight_until_the_step_has_ended(make_world: MakeWorld) -> None:
    world = make_world(regime="fenced")
    table = world.lay("a", "x... .... .d")
    world.reclaim("fill", "a")
    assert table.plan_in_flight
    assert world.plan("fill", "a") is None
    with pytest.raises(SpecError, match="no doomed token in a private slot"):
        world.recycle_next("a")
    world.kill("a", [9])
    world.grow("a", 1)
    world.advance()
    assert not table.plan_in_flight
    world.reclaim("fill", "a")
    world.check()


@pytest.mark.parametrize("end", ["finish", "preempt"])
def test_a_request_that_ends_with_a_plan_in_flight_keeps_its_blocks_behind_the_fence(
    make_world: MakeWorld, end: str
) -> None:
    world = make_world(regime="fenced")
    world.lay("a", "x... .... .x")
    world.reclaim("fill", "a")
    getattr(world, end)("a")
    assert (world.pool.num_free, world.pool.num_in_flight) == (13, 3)
    world.check()
    world.lay("a", "xx")  # back at once, in other blocks
    assert not world.tables["a"].plan_in_flight
    world.advance()
    assert sorted(world.reap()) == [1, 2, 3]
    world.check()


def test_a_step_late_reap_gives_everything_that_has_passed(make_world: MakeWorld) -> None:
    world = make_world(regime="fenced")
    for req_id in ("a", "b"):
        world.lay(req_id, ".... x")
        world.reclaim("release", req_id)
        world.advance()
    assert sorted(world.reap()) == [1, 3]
    world.check()
