"""The scheduler's side of attention mass: packed index -> position, for each pass and its own result."""

from array import array
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vtoken.errors import InvariantError
from vtoken.types import ReqId
from vtoken_torch.vllm_plugin.mass.book import RequestMass
from vtoken_torch.vllm_plugin.parts import SchedulerPart
from vtoken_torch.vllm_plugin.record import MASS_ATTRIBUTE, StepRecord

if TYPE_CHECKING:
    from vtoken_torch.vllm_plugin.driver import EngineDriver

__all__ = ["MassFeed"]


@dataclass(frozen=True, slots=True)
class _Snapshot:
    """Where a request's tokens lay in one pass. Later passes move them before its result is back."""

    req_id: ReqId
    mass: RequestMass  # of before a preemption, perhaps: then nobody reads it any more
    positions: "array[int]"
    columns: Sequence[int] | None
    num_queries: int
    num_computed: int


class MassFeed(SchedulerPart):
    """Asks the workers for mass in each pass, and reads what they report into the book.

    Args:
        driver: whose requests.
        every: of a decoding request, one token in that many is asked for: those at counts that it divides, so that
            what a policy sees follows from the request alone. Of a chunk, all tokens are.
    """

    def __init__(self, driver: "EngineDriver", every: int = 1) -> None:
        self._driver, self._every = driver, every
        self._book = driver.requests.mass
        self._passes: deque[tuple[Any, list[_Snapshot]]] = deque()  # those without a result, oldest first

    def pass_closed(self, output: Any, record: StepRecord) -> None:
        """Notes the packed order of every request that asks, this step's tokens included."""
        if not self._book:
            return
        snapshots = []
        for req_id, num_queries in output.num_scheduled_tokens.items():
            mass = self._mass_of(req_id)
            if mass is not None and self._is_asked_for(req_id, num_queries):
                record.mass[req_id] = mass.need.window
                mass.expect(num_queries)
                ledger = self._driver.ledger
                where = ledger.packed_positions(req_id), ledger.columns(req_id)
                snapshots.append(_Snapshot(req_id, mass, *where, num_queries, ledger.count(req_id)))
        if snapshots:
            self._passes.append((output, snapshots))

    def result_came(self, output: Any, result: Any) -> None:
        """Reads the masses of the pass that this result answers. Results come in the order of their passes."""
        if not self._passes or self._passes[0][0] is not output:
            return  # nobody asked in that pass
        _, snapshots = self._passes.popleft()
        masses = getattr(result, MASS_ATTRIBUTE, {})
        for each in snapshots:
            if each.req_id not in masses:
                raise InvariantError(f"request {each.req_id!r} asked for attention mass, and no worker reported any")
            found = masses[each.req_id]
            live = found if each.columns is None else found[:, each.columns]  # holes have columns too
            each.mass.take(each.positions, live, each.num_queries, each.num_computed)

    def _is_asked_for(self, req_id: ReqId, num_queries: int) -> bool:
        return not self._driver.ledger.count(req_id) % self._every or self._driver.is_chunk(req_id, num_queries)

    def _mass_of(self, req_id: ReqId) -> RequestMass | None:
        return self._book.get(self._driver.trace_key(req_id)) if self._driver.is_running(req_id) else None
