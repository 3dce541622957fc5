from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from vtoken.block_pool import BlockPool
from vtoken.errors import PoolExhausted, SpecError
from vtoken.invariants import check_all, check_conservation, check_launch, check_plan, check_writes
from vtoken.reclamation import ReclamationPlan, get_planner
from vtoken.reclamation.recycle import recyclable
from vtoken.request_table import RequestTable
from vtoken.token_table import TokenTable
from vtoken.types import Move, cdiv


def test_requests_are_found_by_id() -> None:
    tables = TokenTable(4)
    first, second = tables.add("a"), tables.add("b")
    assert tables["a"] is first
    assert list(tables) == ["a", "b"]
    assert len(tables) == 2
    assert "a" in tables
    assert tables.pop("a") is first
    assert dict(tables) == {"b": second}


def test_an_unknown_request_is_refused_by_name() -> None:
    tables = TokenTable(4)
    for call in (tables.__getitem__, tables.pop, lambda req_id: tables.prefix_blocks(req_id, 4)):
        with pytest.raises(SpecError, match="request 'a' is not in the token table: admit it first"):
            call("a")


def test_a_request_is_added_once() -> None:
    tables = TokenTable(4)
    table = tables.add("a")
    with pytest.raises(SpecError, match="request 'a' is in the token table already: finish or preempt it first"):
        tables.add("a")
    assert tables["a"] is table


def test_a_request_added_again_starts_from_nothing() -> None:
    tables = TokenTable(4)
    table = tables.add("a")
    table.sync_new_tokens([1, 2], 6)
    table.evict_tokens([0, 1])
    table.doom([2])
    tables.pop("a")
    fresh = tables.add("a")
    assert (fresh.num_computed_tokens, fresh.num_evicted_tokens, fresh.num_doomed_tokens) == (0, 0, 0)
    assert (fresh.cursor, fresh.block_ids, fresh.next_doomed(1)) == (0, [], [])


def test_a_block_holds_at_least_one_token() -> None:
    with pytest.raises(SpecError, match="block_size=0: give at least 1"):
        TokenTable(0)


def test_a_prefix_is_the_leading_blocks(make_world: Callable[..., Any]) -> None:
    world = make_world()
    world.lay("a", "xxxx xxxx x...")
    assert world.tables.prefix_blocks("a", 4) == [1]
    assert world.tables.prefix_blocks("a", 8) == [1, 2]


@pytest.mark.parametrize("num_tokens", [-4, 0, 3, 12, 100])
def test_a_prefix_is_a_whole_number_of_computed_blocks(make_world: Callable[..., Any], num_tokens: int) -> None:
    world = make_world()
    world.lay("a", "xxxx xxxx xx")
    with pytest.raises(SpecError, match=f"prefix of {num_tokens} tokens .* between 1 and its 10 computed tokens"):
        world.tables.prefix_blocks("a", num_tokens)


def test_a_prefix_with_a_dead_token_is_refused_with_the_longest_that_is_left(make_world: Callable[..., Any]) -> None:
    world = make_world()
    world.lay("a", "xxxx xx.x xxxx")
    with pytest.raises(SpecError, match=r"position 6 was evicted or moved.*share at most 4 tokens"):
        world.tables.prefix_blocks("a", 12)
    assert world.tables.prefix_blocks("a", 4) == [1]


def test_a_prefix_out_of_order_is_refused(make_world: Callable[..., Any]) -> None:
    world = make_world()
    table = world.lay("a", "xxxx x")
    (block,) = world.pool.allocate(1)
    moves = tuple(Move(position, 4 + position, 4 * block + 3 - position) for position in range(4))
    table.apply_plan(
        ReclamationPlan("a", table.layout_version, table.liveness_version, 5, moves, (1,), (block,), packed=False)
    )
    assert table.live_positions() == [3, 2, 1, 0, 4]
    with pytest.raises(SpecError, match="position 0 was evicted or moved"):
        world.tables.prefix_blocks("a", 4)


def test_a_doomed_token_can_be_shared(make_world: Callable[..., Any]) -> None:
    world = make_world()
    world.lay("a", "xdxx x")
    world.fork_prefix("a", "b", 4)
    assert world.tables["b"].num_doomed_tokens == 0
    world.check()


class TableMachine(RuleBasedStateMachine):
    """Tables and pool, driven as an engine would, against dictionaries of live positions."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = TokenTable(4)
        self.pool = BlockPool(14)
        self.live: dict[str, dict[int, str]] = {}  # request -> live position -> "live" or "doomed"
        self.computed: dict[str, int] = {}
        self.tentative: dict[str, int | None] = {}
        self.in_flight: set[str] = set()
        self.freed_in_pass: set[int] = set()
        self.step = 0

    def _pick(self, data: st.DataObject) -> str:
        return data.draw(st.sampled_from(sorted(self.tables)), label="request")

    @precondition(lambda self: len(self.tables) < 3)
    @rule()
    def admit(self) -> None:
        req_id = min({"a", "b", "c"} - set(self.tables))
        self.tables.add(req_id)
        self.live[req_id], self.computed[req_id], self.tentative[req_id] = {}, 0, None

    @precondition(lambda self: self.tables)
    @rule(data=st.data(), num_tokens=st.integers(1, 9))
    def append(self, data: st.DataObject, num_tokens: int) -> None:
        req_id = self._pick(data)
        table, start = self.tables[req_id], self.computed[req_id]
        needed = max(0, cdiv(table.cursor + num_tokens, 4) - len(table.block_ids))
        assert table.num_blocks_needed(num_tokens) == needed
        if needed > self.pool.num_free:
            with pytest.raises(PoolExhausted):
                self.pool.allocate(needed)
            return
        first = table.cursor
        table.sync_new_tokens([*table.block_ids, *self.pool.allocate(needed)], start + num_tokens)
        slots = [table.slot_at(slot) for slot in range(first, first + num_tokens)]
        check_writes(req_id, slots, self.pool, 4)
        assert [table.table_slot_of(start + i) for i in range(num_tokens)] == list(range(first, first + num_tokens))
        self.live[req_id] |= dict.fromkeys(range(start, start + num_tokens), "live")
        self.computed[req_id] += num_tokens
        self.tentative[req_id] = None

    @precondition(lambda self: any(self.computed.values()))
    @rule(data=st.data())
    def kill(self, data: st.DataObject) -> None:
        req_id = self._pick(data)
        positions = data.draw(st.lists(st.integers(0, max(0, self.computed[req_id] - 1)), max_size=8))
        if not self.computed[req_id]:
            return
        killed = [position for position in dict.fromkeys(positions) if position in self.live[req_id]]
        assert self.tables[req_id].evict_tokens(positions) == killed
        for position in killed:
            del self.live[req_id][position]
            self.tentative[req_id] = None

    @precondition(lambda self: any(self.live.values()))
    @rule(data=st.data())
    def doom(self, data: st.DataObject) -> None:
        req_id = self._pick(data)
        live = self.live[req_id]
        candidates = sorted(position for position, state in live.items() if state == "live")
        if not candidates:
            return
        victims = data.draw(st.lists(st.sampled_from(candidates), unique=True, max_size=6))
        self.tables[req_id].doom(victims)
        for position in victims:
            del live[position]
            live[position] = "doomed"  # at the end: the dictionary keeps the order of the queue
        self.tentative[req_id] = None

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def recycle(self, data: st.DataObject) -> None:
        req_id = self._pick(data)
        table, live, position = self.tables[req_id], self.live[req_id], self.computed[req_id]
        victim = recyclable(table, self.pool)
        if victim is None:
            return
        assert victim == next(position for position, state in live.items() if state == "doomed")
        before = (table.cursor, list(table.block_ids), table.num_live_tokens)
        check_writes(req_id, [table.recycle(victim, position)], self.pool, 4)
        assert (table.cursor, table.block_ids, table.num_live_tokens) == before
        del live[victim]
        live[position] = "live"
        self.computed[req_id] += 1
        self.tentative[req_id] = victim

    @precondition(lambda self: any(victim is not None for victim in self.tentative.values()))
    @rule(data=st.data())
    def rollback(self, data: st.DataObject) -> None:
        req_id = data.draw(st.sampled_from(sorted(r for r, victim in self.tentative.items() if victim is not None)))
        victim = self.tables[req_id].rollback_recycle()
        assert victim == self.tentative[req_id]
        self.computed[req_id] -= 1
        del self.live[req_id][self.computed[req_id]]
        self.live[req_id] = {victim: "doomed", **self.live[req_id]}
        self.tentative[req_id] = None

    @precondition(lambda self: any(self.live.values()))
    @rule(data=st.data(), planner=st.sampled_from(["fill", "evacuate", "release"]), fenced=st.booleans())
    def reclaim(self, data: st.DataObject, planner: str, fenced: bool) -> None:
        req_id = self._pick(data)
        table = self.tables[req_id]
        plan = get_planner(planner).plan(table, self.pool)
        if plan is None:
            return
        check_plan(plan, table)
        check_launch([plan], self.tables, self.freed_in_pass)
        kept = {move.dst_slot for move in plan.moves if move.dst_slot // 4 not in plan.new_block_ids}
        check_writes(req_id, kept, self.pool, 4)
        before = self._states(table)
        self.pool.take(plan.new_block_ids)
        table.apply_plan(plan)
        self.freed_in_pass.update(self.pool.free(plan.freed_block_ids, self.step + 1 if fenced else None))
        if fenced:
            self.in_flight.add(req_id)
        else:
            table.plan_done()
        check_conservation(req_id, before, self._states(table))
        assert table.is_packed or not plan.packed

    @precondition(lambda self: self.tables)
    @rule(data=st.data(), num_blocks=st.integers(1, 3))
    def fork(self, data: st.DataObject, num_blocks: int) -> None:
        parent_id, child_id = self._pick(data), "d"
        table, num_tokens = self.tables[parent_id], num_blocks * 4
        in_place = all(
            position in self.live[parent_id] and table.table_slot_of(position) == position
            for position in range(min(num_tokens, self.computed[parent_id]))
        )
        if num_tokens > self.computed[parent_id] or not in_place:
            with pytest.raises(SpecError, match="prefix of"):
                self.tables.prefix_blocks(parent_id, num_tokens)
            return
        if child_id in self.tables:
            return
        shared = self.tables.prefix_blocks(parent_id, num_tokens)
        self.pool.share(shared)
        self.tables.add(child_id).sync_new_tokens(shared, num_tokens)
        self.live[child_id] = dict.fromkeys(range(num_tokens), "live")
        self.computed[child_id], self.tentative[child_id] = num_tokens, None

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def finish_or_preempt(self, data: st.DataObject) -> None:
        req_id = self._pick(data)
        table = self.tables.pop(req_id)
        fence = self.step + 1 if req_id in self.in_flight else None
        self.freed_in_pass.update(self.pool.free(table.block_ids, fence))
        self.in_flight.discard(req_id)
        for record in (self.live, self.computed, self.tentative):
            del record[req_id]

    @rule(reaps=st.booleans())
    def advance(self, reaps: bool) -> None:
        self.step += 1
        self.pool.begin_pass()
        self.freed_in_pass.clear()
        for req_id in self.in_flight:
            self.tables[req_id].plan_done()
        self.in_flight.clear()
        if reaps:
            self.pool.reap(self.step)

    @staticmethod
    def _states(table: RequestTable) -> dict[int, bool]:
        return {position: table.is_doomed(position) for position in table.live_positions()}

    @invariant()
    def all_invariants_hold(self) -> None:
        check_all(self.tables, self.pool)

    @invariant()
    def agrees_with_the_dictionaries(self) -> None:
        for req_id, table in self.tables.items():
            live = self.live[req_id]
            doomed = [position for position, state in live.items() if state == "doomed"]
            assert sorted(table.live_positions()) == sorted(live)
            assert table.next_doomed(len(doomed) + 1) == doomed
            assert table.candidates() == sorted(live.keys() - set(doomed))
            assert (table.num_computed_tokens, table.num_live_tokens) == (self.computed[req_id], len(live))
            assert (table.num_doomed_tokens, table.num_evicted_tokens) == (
                len(doomed),
                self.computed[req_id] - len(live),
            )
            assert all(table.is_live(position) == (position in live) for position in range(self.computed[req_id]))


TestTableMachine = TableMachine.TestCase
TestTableMachine.settings = settings(max_examples=150, stateful_step_count=50)
