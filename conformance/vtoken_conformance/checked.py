"""An executor under watch: every call goes to it and to the model, and then the two are compared."""

from collections.abc import Iterable

from vtoken.executor import Attention, Buffer, Executor, KVSpec, Observation, Ticket
from vtoken.reclamation.plan import PoolView, ReclamationPlan, TableView
from vtoken.types import BlockId, Position, ReqId
from vtoken_conformance.fingerprint import fingerprint
from vtoken_conformance.mismatch import Call, Mismatch, compare_equal
from vtoken_conformance.plan_check import check_planned, check_profit, read_plan
from vtoken_conformance.returned import check_attention, check_block_ids, check_observation
from vtoken_conformance.state import Refusal
from vtoken_conformance.watcher import Watcher

__all__ = ["CheckedExecutor"]

MAX_SETTLE_ROUNDS = 64


class CheckedExecutor(Watcher):
    """Implements ``Executor`` over another one. The first difference from the model raises ``Mismatch``.

    Args:
        inner: the executor under test.
        check_every: counts are compared after every call; bytes, places, fingerprints, the free list and attention
            after every n-th. 1 for small programs; more for a real model's KV.
        attend: whether to ask for attention of its own accord, under fixed pseudo-random queries.
        source_utilization: what the driver's ``evacuate`` was made with (R-6).
    """

    spec: KVSpec

    def __init__(
        self, inner: Executor, *, check_every: int = 1, attend: bool = True, source_utilization: float = 0.5
    ) -> None:
        super().__init__(inner, check_every, attend)
        self.name = inner.name
        self._source_utilization = source_utilization

    def allocate(self, spec: KVSpec) -> None:
        self.inner.allocate(spec)
        self.spec = spec
        self._start(spec)

    # -- requests ----------------------------------------------------------------------------------------------------

    def admit(self, req_id: ReqId) -> None:
        self._run(Call("admit", (req_id,)), lambda: self.model.admit(req_id), lambda: self.inner.admit(req_id))

    def fork_prefix(self, parent_id: ReqId, child_id: ReqId, num_tokens: int) -> None:
        self._run(
            Call("fork", (child_id, parent_id)),
            lambda: self.model.fork_prefix(parent_id, child_id, num_tokens),
            lambda: self.inner.fork_prefix(parent_id, child_id, num_tokens),
        )

    def preempt(self, req_id: ReqId) -> None:
        self._run(Call("preempt", (req_id,)), lambda: self.model.finish(req_id), lambda: self.inner.preempt(req_id))

    def finish(self, req_id: ReqId) -> None:
        self._run(Call("finish", (req_id,)), lambda: self.model.finish(req_id), lambda: self.inner.finish(req_id))

    # -- tokens ------------------------------------------------------------------------------------------------------

    def append(self, req_id: ReqId, num_tokens: int, kv: Buffer) -> None:
        self._run(
            Call("append", (req_id,)),
            lambda: self.model.append(req_id, self._split(num_tokens, kv)),
            lambda: self.inner.append(req_id, num_tokens, kv),
        )

    def doom(self, req_id: ReqId, positions: Iterable[Position]) -> None:
        chosen = list(positions)

        def verify(_: None, __: None) -> None:
            queue = self.model.requests[req_id].doomed
            seen = self.table_view(req_id).next_doomed(len(queue) + 1)
            compare_equal("T-4", f"queue of doomed tokens of request {req_id!r}", queue, seen)

        call = Call("doom", (req_id,))
        self._run(call, lambda: self.model.doom(req_id, chosen), lambda: self.inner.doom(req_id, chosen), verify)

    def kill(self, req_id: ReqId, positions: Iterable[Position]) -> list[Position]:
        chosen = list(positions)

        def verify(expected: list[Position], killed: list[Position]) -> None:
            compare_equal("T-3", f"positions of request {req_id!r} that kill changed", expected, killed)

        call = Call("kill", (req_id,))
        return self._run(call, lambda: self.model.kill(req_id, chosen), lambda: self.inner.kill(req_id, chosen), verify)

    def recycle(self, req_id: ReqId, kv: Buffer) -> None:
        self._run(
            Call("recycle", (req_id,)),
            lambda: self.model.recycle(req_id, self._split(1, kv)),
            lambda: self.inner.recycle(req_id, kv),
        )

    # -- plans and fences --------------------------------------------------------------------------------------------

    def check_plan(self, req_id: ReqId, planner: str, plan: ReclamationPlan | None) -> None:
        """Compares a plan, or the lack of one, with the rule of its planner."""
        with self._numbered():
            change = None if plan is None else read_plan(self.model, plan, self.table_view(req_id))
            check_planned(self.model, req_id, (planner,), change, self._source_utilization)

    def launch(self, plan: ReclamationPlan) -> Ticket:
        def verify(_: None, ticket: Ticket) -> None:
            in_flight = {block.block_id for block in self.model.in_flight()}
            fenced = tuple(block_id for block_id in plan.freed_block_ids if block_id in in_flight)
            compare_equal("R-7", "ticket of the launch", Ticket(plan.req_id, len(plan.moves), fenced), ticket)

        call = Call("launch", (plan.req_id,))
        return self._run(call, lambda: self._commit(plan), lambda: self.inner.launch(plan), verify)

    def _commit(self, plan: ReclamationPlan) -> None:
        change = read_plan(self.model, plan, self.table_view(plan.req_id))
        planners = ("fill",) if plan.packed else ("release", "evacuate")
        check_planned(self.model, plan.req_id, planners, change, self._source_utilization)
        fresh = self.model.apply(plan.req_id, change)
        for block, block_id in zip(fresh, plan.new_block_ids, strict=True):
            block.block_id = block_id
        check_profit(self.model, plan.req_id, change)

    def advance(self) -> None:
        self._run(Call("advance"), self.model.advance, self.inner.advance)

    def reap(self) -> list[BlockId]:
        def perform() -> list[BlockId]:
            due = {block.block_id: block for block in self.model.due()}
            reaped = check_block_ids("R-7", "reap", self.inner.reap())
            if len({*reaped}) != len(reaped) or not {*reaped} <= due.keys():
                raise Mismatch("R-7", "blocks that reap gave back", f"some of {list(due)}", reaped)
            self.model.reap(due[block_id] for block_id in reaped)
            return reaped

        return self._run(Call("reap"), lambda: None, perform)

    def settle(self) -> None:
        """``advance`` and ``reap`` until nothing is in flight; then free and held are exact."""
        with self._numbered():
            for _ in range(MAX_SETTLE_ROUNDS):
                self.advance()
                self.reap()
                if not self.model.in_flight():
                    return
            waiting = [block.block_id for block in self.model.in_flight()]
            raise Mismatch("R-7", f"blocks in flight after {MAX_SETTLE_ROUNDS} steps", "none", waiting)

    # -- reading -----------------------------------------------------------------------------------------------------

    def attend(self, req_id: ReqId, q: Buffer, num_queries: int = 1) -> Attention:
        def predict() -> None:
            num_computed = self.model.known(req_id).num_computed
            if not 1 <= num_queries <= num_computed:
                raise Refusal("T-8", f"{num_queries} queries of {num_computed} computed tokens")
            if len(q) != num_queries * self.spec.query_elements * 4:
                raise Refusal("T-8", f"q has {len(q)} bytes, {num_queries} queries have another number")

        def verify(_: None, seen: Attention) -> None:
            check_attention(seen)
            if self._is_comparable(req_id):
                self._compare_attention(req_id, seen, bytes(q), num_queries)

        call = Call("attend", (req_id,))
        return self._run(call, predict, lambda: self.inner.attend(req_id, q, num_queries), verify)

    def fingerprint(self, req_id: ReqId) -> str:
        def verify(expected: str, seen: str) -> None:
            compare_equal("H-2", f"fingerprint of request {req_id!r}", expected, seen)

        call = Call("fingerprint", (req_id,))
        return self._run(
            call, lambda: fingerprint(self.model.known(req_id).kv), lambda: self.inner.fingerprint(req_id), verify
        )

    def verify(self) -> None:
        """Compares everything now, whatever ``check_every`` says."""
        with self._numbered():
            self._compare(Call("verify", tuple(self.model.requests)), is_full=True)

    def observe(self) -> Observation:
        return check_observation(self.inner.observe())

    def table_view(self, req_id: ReqId) -> TableView:
        return self.inner.table_view(req_id)

    def pool_view(self) -> PoolView:
        return self.inner.pool_view()

    # -- parts -------------------------------------------------------------------------------------------------------

    def _split(self, num_tokens: int, kv: Buffer) -> list[bytes]:
        size = self.spec.token_bytes
        if len(kv) != num_tokens * size:
            raise Refusal("T-8", f"kv has {len(kv)} bytes, {num_tokens} tokens have {num_tokens * size}")
        return [bytes(kv[index * size : (index + 1) * size]) for index in range(num_tokens)]
