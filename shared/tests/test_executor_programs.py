"""Random programs of executor calls, with every invariant checked after each."""

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from vtoken.errors import PoolExhausted, SpecError
from vtoken.reclamation.recycle import recyclable

MakeWorld = Callable[..., Any]


class ExecutorMachine(RuleBasedStateMachine):
    """Random programs; after each call all invariants hold, and the store holds the bytes that a dictionary expects."""

    def __init__(self, make_world: MakeWorld, regime: str) -> None:
        super().__init__()
        self.world = make_world(num_blocks=14, max_num_reqs=3, regime=regime)
        self.live: dict[str, set[int]] = {}

    def _pick(self, data: st.DataObject) -> str:
        return data.draw(st.sampled_from(sorted(self.live)), label="request")

    @rule(req_id=st.sampled_from("abcd"))
    def admit(self, req_id: str) -> None:
        if req_id in self.live or len(self.live) == 3:
            with pytest.raises(SpecError, match=r"admitted|rows are taken"):
                self.world.admit(req_id)
        else:
            self.world.admit(req_id)
            self.live[req_id] = set()

    @precondition(lambda self: self.live)
    @rule(data=st.data(), num_tokens=st.integers(1, 9))
    def append(self, data: st.DataObject, num_tokens: int) -> None:
        req_id = self._pick(data)
        table = self.world.tables[req_id]
        first = table.num_computed_tokens
        if table.num_blocks_needed(num_tokens) > self.world.pool.num_free:
            with pytest.raises(PoolExhausted):
                self.world.grow(req_id, num_tokens)
        else:
            self.world.grow(req_id, num_tokens)
            self.live[req_id] |= set(range(first, first + num_tokens))

    @precondition(lambda self: any(self.live.values()))
    @rule(data=st.data(), dooms=st.booleans())
    def kill_or_doom(self, data: st.DataObject, dooms: bool) -> None:
        req_id = self._pick(data)
        candidates = self.world.tables[req_id].candidates()
        victims = data.draw(st.lists(st.sampled_from(candidates), unique=True) if candidates else st.just([]))
        if dooms:
            self.world.doom(req_id, victims)
        else:
            assert self.world.kill(req_id, victims) == victims
            self.live[req_id] -= set(victims)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def recycle(self, data: st.DataObject) -> None:
        req_id = self._pick(data)
        table = self.world.tables[req_id]
        victim = recyclable(table, self.world.pool)
        if victim is None:
            with pytest.raises(SpecError, match="no doomed token"):
                self.world.recycle(req_id, bytes(self.world.spec.token_bytes))
        else:
            self.live[req_id] = self.live[req_id] - {victim} | {table.num_computed_tokens}
            self.world.recycle_next(req_id)

    @precondition(lambda self: self.live)
    @rule(data=st.data(), planner=st.sampled_from(["fill", "evacuate", "release"]))
    def reclaim(self, data: st.DataObject, planner: str) -> None:
        plan = self.world.plan(planner, self._pick(data))
        if plan is not None:
            self.world.launch(plan)

    @precondition(lambda self: self.live)
    @rule(data=st.data(), num_blocks=st.integers(1, 3))
    def fork(self, data: st.DataObject, num_blocks: int) -> None:
        parent_id, child_id = self._pick(data), data.draw(st.sampled_from("abcd"), label="child")
        try:
            self.world.fork_prefix(parent_id, child_id, num_blocks * 4)
        except SpecError:
            return
        assert set(range(num_blocks * 4)) <= self.live[parent_id]
        self.live[child_id] = set(range(num_blocks * 4))

    @precondition(lambda self: self.live)
    @rule(data=st.data(), preempts=st.booleans())
    def end(self, data: st.DataObject, preempts: bool) -> None:
        req_id = self._pick(data)
        (self.world.preempt if preempts else self.world.finish)(req_id)
        del self.live[req_id]

    @rule()
    def advance(self) -> None:
        self.world.advance()

    @rule()
    def reap(self) -> None:
        self.world.reap()

    @invariant()
    def holds_what_is_expected(self) -> None:
        self.world.check()
        assert {req_id: set(table.live_positions()) for req_id, table in self.world.tables.items()} == self.live


@pytest.mark.parametrize("regime", ["ordered", "fenced"])
def test_random_programs_keep_every_invariant_and_every_byte(make_world: MakeWorld, regime: str) -> None:
    run_state_machine_as_test(
        lambda: ExecutorMachine(make_world, regime), settings=settings(max_examples=80, stateful_step_count=50)
    )
