"""An executor under watch: every call goes to it and to the model, and then the two are compared."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from hashlib import blake2b
from typing import TypeVar

from vtoken.errors import PoolExhausted, SpecError
from vtoken.executor import Attention, Buffer, Executor, KVSpec, Observation, Ticket
from vtoken.reclamation.plan import PoolView, ReclamationPlan, TableView
from vtoken.types import BlockId, Position, ReqId
from vtoken_conformance.bits import is_moderate, make_queries
from vtoken_conformance.compare import (
    Call,
    Mismatch,
    VersionWatch,
    compare_arrays,
    compare_attention,
    compare_equal,
    compare_views,
)
from vtoken_conformance.model import Model, Refusal
from vtoken_conformance.plan_check import check_planned, check_profit, read_plan

__all__ = ["CheckedExecutor"]

MAX_SETTLE_ROUNDS = 64
_MULTI_QUERY = 3

Predicted = TypeVar("Predicted")
Result = TypeVar("Result")


class CheckedExecutor:
    """Implements ``Executor`` over another one. The first difference from the model raises ``Mismatch``.

    Args:
        inner: the executor under test.
        check_every: counts are compared after every call; bytes, places, fingerprints, the free list and attention
            after every n-th. 1 for small programs; more for a real model's KV.
        attend: whether to ask for attention of its own accord, under fixed pseudo-random queries.
        source_utilization: what the driver's ``evacuate`` was made with (R-6).
    """

    def __init__(
        self, inner: Executor, *, check_every: int = 1, attend: bool = True, source_utilization: float = 0.5
    ) -> None:
        if check_every < 1:
            raise SpecError(f"check_every={check_every}: give at least 1")
        self.inner = inner
        self.name = inner.name
        self.num_calls = 0
        self.num_attention_checks = 0
        self._check_every = check_every
        self._attend = attend
        self._source_utilization = source_utilization

    def allocate(self, spec: KVSpec) -> None:
        self.inner.allocate(spec)
        self.spec = spec
        self.model = Model(spec)
        self._versions = VersionWatch()
        self._digest = blake2b(digest_size=8)

    @property
    def fingerprint_so_far(self) -> str:
        """16 hex digits over the fingerprints of all requests after all calls that were compared in full."""
        return self._digest.hexdigest()

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
            reaped = self.inner.reap()
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
            if self._is_comparable(req_id):
                self._compare_attention(req_id, seen, bytes(q), num_queries)

        call = Call("attend", (req_id,))
        return self._run(call, predict, lambda: self.inner.attend(req_id, q, num_queries), verify)

    def fingerprint(self, req_id: ReqId) -> str:
        return self.inner.fingerprint(req_id)

    def observe(self) -> Observation:
        return self.inner.observe()

    def table_view(self, req_id: ReqId) -> TableView:
        return self.inner.table_view(req_id)

    def pool_view(self) -> PoolView:
        return self.inner.pool_view()

    # -- comparing ---------------------------------------------------------------------------------------------------

    def _run(
        self,
        call: Call,
        predict: Callable[[], Predicted],
        perform: Callable[[], Result],
        verify: Callable[[Predicted, Result], None] | None = None,
    ) -> Result:
        self.num_calls += 1
        is_full = self.num_calls % self._check_every == 0
        with self._numbered():
            try:
                predicted = predict()
            except Refusal as refusal:
                raise self._refused(call, refusal, perform) from None
            try:
                result = perform()
            except SpecError as error:
                raise Mismatch(call.main_rule, f"{call.op} is legal here", "it goes through", _named(error)) from error
            self._compare(call, is_full)
            if verify:
                verify(predicted, result)
            if is_full and self._attend:
                self._probe_attention(call)
        return result

    def _refused(self, call: Call, refusal: Refusal, perform: Callable[[], object]) -> SpecError:
        """The error of a call that must be refused, once nothing was found changed by it (T-8, Q-5)."""
        try:
            perform()
        except SpecError as error:
            if isinstance(error, PoolExhausted) != (refusal.error is PoolExhausted):
                wanted = f"{refusal.error.__name__}, since {refusal}"
                raise Mismatch(refusal.rule, f"error of {call.op}", wanted, _named(error)) from error
            self._compare(Call("refused", call.touched), is_full=True)
            return error
        raise Mismatch(refusal.rule, f"{call.op} is refused: {refusal}", refusal.error.__name__, "it went through")

    def _compare(self, call: Call, is_full: bool) -> None:
        compare_views(self.model, self.inner, call)
        self._versions.compare(self.model, self.inner, call)
        if is_full:
            observation = self.inner.observe()
            compare_arrays(self.model, observation, call)
            for req_id in sorted(self.model.requests):
                self._digest.update(f"{req_id} {observation.requests[req_id].fingerprint}\n".encode())

    def _probe_attention(self, call: Call) -> None:
        for req_id in call.touched:
            if req_id not in self.model.requests or not self.model.requests[req_id].num_computed:
                continue
            if self._is_comparable(req_id):
                many = self.num_calls % 2 == 0 and self.model.requests[req_id].num_computed >= _MULTI_QUERY
                num_queries = _MULTI_QUERY if many else 1
                q = make_queries(self.spec, str(self.num_calls), num_queries)
                self._compare_attention(req_id, self.inner.attend(req_id, q, num_queries), q, num_queries)

    def _is_comparable(self, req_id: ReqId) -> bool:
        """Whether all live tokens are ordinary numbers, so that exact arithmetic has an answer."""
        return all(is_moderate(data, self.spec.dtype) for data in self.model.requests[req_id].kv.values())

    def _compare_attention(self, req_id: ReqId, seen: Attention, q: bytes, num_queries: int) -> None:
        end = self.model.requests[req_id].num_computed
        compare_attention(self.model, req_id, seen, q, range(end - num_queries, end))
        self.num_attention_checks += 1

    def _split(self, num_tokens: int, kv: Buffer) -> list[bytes]:
        size = self.spec.token_bytes
        if len(kv) != num_tokens * size:
            raise Refusal("T-8", f"kv has {len(kv)} bytes, {num_tokens} tokens have {num_tokens * size}")
        return [bytes(kv[index * size : (index + 1) * size]) for index in range(num_tokens)]

    @contextmanager
    def _numbered(self) -> Iterator[None]:
        try:
            yield
        except Mismatch as mismatch:
            mismatch.step = self.num_calls
            raise


def _named(error: SpecError) -> str:
    return f"{type(error).__name__}: {error}"
