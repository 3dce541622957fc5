"""The scheduler's side of attention mass: orders to the workers with each step, and their answers."""

from array import array
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vtoken.errors import InvariantError
from vtoken.types import ReqId
from vtoken_torch.vllm_plugin.mass.book import RequestMass
from vtoken_torch.vllm_plugin.mass.orders import MASS_ATTRIBUTE, MassOrder, Question
from vtoken_torch.vllm_plugin.parts import SchedulerPart
from vtoken_torch.vllm_plugin.record import StepRecord

if TYPE_CHECKING:
    from vtoken_torch.vllm_plugin.driver import EngineDriver
    from vtoken_torch.vllm_plugin.shortage import Shortage

__all__ = ["MassFeed"]


@dataclass(frozen=True, slots=True)
class _Awaited:
    """What the result of one pass will say of a request."""

    req_id: ReqId
    mass: RequestMass  # of before a preemption, perhaps
    is_scored: bool
    num_queries: int
    num_computed: int
    number: int
    question: Question | None


class MassFeed(SchedulerPart):
    """Tells the workers in each pass where its tokens lie and whose mass counts, and asks what choices will need.

    Args:
        driver: whose requests.
        every: of a decoding request, one token in that many is scored: those at counts that it divides, so that
            what a policy sees follows from the request alone. Of a chunk, all tokens are.
        shortage: whether memory may be short when a pass is opened that has this one's result, and how many are
            opened before.
    """

    def __init__(self, driver: "EngineDriver", every: int, shortage: "Shortage") -> None:
        self._driver, self._every, self._shortage, self._lead = driver, every, shortage, shortage.lead
        self._book = driver.requests.mass
        self._passes: deque[tuple[Any, list[_Awaited]]] = deque()  # those without a result, oldest first

    def pass_closed(self, output: Any, record: StepRecord) -> None:
        """Orders for every request that is scored, or was moved."""
        if not self._book:
            return
        is_short = self._shortage.may_come()
        awaited = []
        scheduled = output.num_scheduled_tokens
        for req_id, num_queries in scheduled.items():
            mass = self._mass_of(req_id)
            if mass is not None:
                awaited.append(self._order(req_id, mass, num_queries, record, is_short))
        for req_id in record.block_ids.keys() - scheduled.keys():
            if self._mass_of(req_id) is not None:
                record.mass[req_id] = MassOrder(
                    self._driver.ledger.count(req_id), 0, 0, False, positions=self._layout(req_id)
                )
        if awaited:
            self._passes.append((output, awaited))

    def result_came(self, output: Any, result: Any) -> None:
        """Reads the answers to the pass that this result answers. Results come in the order of their passes."""
        if not self._passes or self._passes[0][0] is not output:
            return  # nobody was in that pass
        _, awaited = self._passes.popleft()
        answers = getattr(result, MASS_ATTRIBUTE, {})
        for each in awaited:
            if self._mass_of(each.req_id) is not each.mass:
                continue  # it left, was preempted, or verification led its step astray: nobody reads it
            if each.is_scored:
                each.mass.known(each.num_queries, each.num_computed)
            if each.question is None:
                continue
            if each.req_id not in answers:
                raise InvariantError(f"request {each.req_id!r} was asked about its mass, and no worker answered")
            each.mass.answered(each.number, each.question, answers[each.req_id])

    def _order(
        self, req_id: ReqId, mass: RequestMass, num_queries: int, record: StepRecord, is_short: bool
    ) -> _Awaited:
        table = self._driver.ledger.table(req_id)
        count = table.num_computed_tokens
        start = count - num_queries
        is_scored = not count % self._every or self._driver.is_chunk(req_id, num_queries)
        question = self._driver.question(req_id, self._lead, is_short)
        record.mass[req_id] = MassOrder(
            start,
            num_queries,
            table.table_slot_of(start),
            is_scored,
            need=None if mass.is_told else mass.need,
            positions=self._layout(req_id) if req_id in record.block_ids else None,
            question=question,
        )
        mass.is_told = True
        if is_scored:
            mass.expect(num_queries)
        number = 0 if question is None else mass.asked(count + self._lead)
        return _Awaited(req_id, mass, is_scored, num_queries, count, number, question)

    def _layout(self, req_id: ReqId) -> "array[int]":
        """The position at each packed index of what vLLM's kernels read; -1 in a hole."""
        ledger = self._driver.ledger
        positions, columns = ledger.packed_positions(req_id), ledger.columns(req_id)
        if columns is None:
            return positions
        layout = array("i", [-1]) * ledger.table(req_id).cursor
        for column, position in zip(columns, positions, strict=True):
            layout[column] = position
        return layout

    def _mass_of(self, req_id: ReqId) -> RequestMass | None:
        return self._book.get(self._driver.trace_key(req_id)) if self._driver.is_running(req_id) else None
