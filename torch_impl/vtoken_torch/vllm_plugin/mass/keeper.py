"""The worker's side of attention mass: kept where it is collected, so that only victims leave the device."""

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from vtoken.errors import InvariantError
from vtoken.types import ReqId
from vtoken_torch.vllm_plugin.mass.collector import MassCollector
from vtoken_torch.vllm_plugin.mass.kept import KeptMass
from vtoken_torch.vllm_plugin.mass.orders import MASS_ATTRIBUTE, Answer, MassOrder
from vtoken_torch.vllm_plugin.mass.queries import Ask
from vtoken_torch.vllm_plugin.parts import WorkerPart
from vtoken_torch.vllm_plugin.record import StepRecord

if TYPE_CHECKING:
    from vtoken_torch.vllm_plugin.lazy.holes import HoleKeeper
    from vtoken_torch.vllm_plugin.worker_side import WorkerSide

__all__ = ["MassKeeper"]


class MassKeeper(WorkerPart):
    """Carries out the orders of each step. All tensor-parallel ranks do the same; vLLM hands on one rank's answers.

    Attributes:
        kept: the requests whose policies look at attention.
    """

    def __init__(self, side: "WorkerSide", holes: "HoleKeeper | None" = None, *, replaces: bool = True) -> None:
        """``holes``, ``replaces``: as in ``MassCollector``."""
        self._side = side
        self._collector = MassCollector(lambda: side.layers, holes, replaces=replaces)
        self.kept: dict[ReqId, KeptMass] = {}
        self._orders: Mapping[ReqId, MassOrder] = {}
        self.acts = self.reports = False

    def requests_left(self, req_ids: Collection[ReqId]) -> None:
        for req_id in req_ids:
            self.kept.pop(req_id, None)

    def before_moves(self, record: StepRecord) -> None:
        """The layouts of this step. Mass moves on its own account: whether the KV has moved yet does not matter."""
        self._orders, self.acts = record.mass, bool(record.mass)
        for req_id, order in record.mass.items():
            self._place(req_id, order)

    def before_forward(self, req_ids: Sequence[ReqId]) -> None:
        """Finds the rows that are scored in the batch."""
        orders, asks, start = self._orders, [], 0
        for row, req_id in enumerate(req_ids) if orders else ():
            num_tokens = self._side.num_scheduled[req_id]
            if req_id in orders and orders[req_id].is_scored:
                kept = self.kept[req_id]
                asks.append(Ask(req_id, row, kept.need.window, start, num_tokens, kept.num_slots))
            start += num_tokens
        self._collector.begin(asks)
        self.reports = bool(asks) or any(order.question is not None for order in orders.values())

    def after_forward(self, req_ids: Sequence[ReqId], result: Any) -> None:
        """Adds the step up, then answers.

        Verification leads the step of a request that it is about to fail to another place: nobody reads what is said
        of its mass.
        """
        orders, self._orders, self.reports = self._orders, {}, False
        dead = self._collector.dead or {}
        for req_id, masses in self._collector.end().items():
            order = orders[req_id]
            self.kept[req_id].add(masses, order.num_tokens, order.start + order.num_tokens)
        answers: dict[ReqId, Answer] = {}
        for row, req_id in enumerate(req_ids):
            question = orders[req_id].question if req_id in orders else None
            if question is not None:
                answers[req_id] = self.kept[req_id].answer(question, dead.get(row))
        if answers:
            setattr(result, MASS_ATTRIBUTE, answers)

    def _place(self, req_id: ReqId, order: MassOrder) -> None:
        if order.need is not None:
            self.kept[req_id] = KeptMass(order.need, order.start, self._side.runner.device)
        kept = self.kept.get(req_id)
        if kept is None:
            raise InvariantError(f"attention mass of request {req_id!r}, of which no worker was told how to keep it")
        if order.positions is not None:
            kept.rearrange(order.positions, order.start + order.num_tokens)
        else:
            kept.write(order.place, order.start, order.num_tokens)
