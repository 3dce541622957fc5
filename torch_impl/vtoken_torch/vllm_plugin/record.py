"""The one record between the two sides: what the scheduler decided, for the workers to carry out in this step."""

from dataclasses import dataclass, field

from vtoken.types import BlockId, ReqId, SlotId

__all__ = ["ATTRIBUTE", "StepRecord"]

ATTRIBUTE = "vtoken_record"
"""Name under which the record hangs on vLLM's ``SchedulerOutput``; it is pickled with it."""


@dataclass
class StepRecord:
    """Carried out before anything else in the step; empty fields cost nothing.

    Attributes:
        src_slots, dst_slots: token copies in all layers. Every source is read before any destination is written.
        block_ids: whole block lists of requests whose list a plan changed, without what vLLM adds in this step.
        num_evicted: for requests where it changed: dead tokens, so that packed index = position - num_evicted.
        recycled: for requests that write this step's one token over a dead one: its slot.
    """

    src_slots: list[SlotId] = field(default_factory=list)
    dst_slots: list[SlotId] = field(default_factory=list)
    block_ids: dict[ReqId, list[BlockId]] = field(default_factory=dict)
    num_evicted: dict[ReqId, int] = field(default_factory=dict)
    recycled: dict[ReqId, SlotId] = field(default_factory=dict)
