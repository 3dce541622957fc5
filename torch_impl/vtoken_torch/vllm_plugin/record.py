"""The one record between the two sides: what the scheduler decided, for the workers to carry out in this step."""

from array import array
from dataclasses import dataclass, field

from vtoken.types import BlockId, Position, ReqId, SlotId
from vtoken_torch.vllm_plugin.mass.orders import MassOrder
from vtoken_torch.vllm_plugin.verify.changes import PassChanges

__all__ = ["ATTRIBUTE", "LiveWords", "Recycles", "StepRecord"]

ATTRIBUTE = "vtoken_record"
"""Name under which the record hangs on vLLM's ``SchedulerOutput``; it is pickled with it."""


@dataclass(frozen=True, slots=True)
class Recycles:
    """Tokens of one request that go over dead ones, one after another: in each step that the request gets, one token.

    They hold until the record of a later step names the request in ``num_evicted`` or ``recycles``, or it leaves.

    Attributes:
        first: position of the first of them.
        num_dead: dead tokens of the request before it; each of them adds one.
        slots: ``SlotId`` s; the token at position ``first + i`` goes into ``slots[i]``.
    """

    first: Position
    num_dead: int
    slots: "array[int]"


@dataclass(frozen=True, slots=True)
class LiveWords:
    """Which slots of a request hold a live token, in lazy mode: of some of its blocks.

    Attributes:
        first: index of the first of these blocks in the request's block list.
        words: one for each block; bit o is set if slot o is live, or still unwritten: what is appended there
            later needs no word.
    """

    first: int
    words: tuple[int, ...]


@dataclass
class StepRecord:
    """Carried out before anything else in the step; empty fields cost nothing.

    Attributes:
        number: counts the scheduling passes.
        src_slots, dst_slots: token copies in all layers. Every source is read before any destination is written.
        block_ids: whole block lists of requests whose list a plan changed, without what vLLM adds in this step.
        num_evicted: for requests where it changed: dead tokens, so that packed index = position - num_evicted.
        recycles: for requests whose next tokens go over dead ones, from this step on. A step says nothing of it while
            it goes on.
        live_words: in lazy mode, words that changed; slots of which nothing was said are live. All words of a request
            are told when its block list is, none of them if it has no hole any more.
        mass: for requests whose policy looks at attention, if they are in the step or a plan changed their layout.
        verify: in verification mode, what the pass did to each token.
    """

    number: int = 0
    src_slots: list[SlotId] = field(default_factory=list)
    dst_slots: list[SlotId] = field(default_factory=list)
    block_ids: dict[ReqId, list[BlockId]] = field(default_factory=dict)
    num_evicted: dict[ReqId, int] = field(default_factory=dict)
    recycles: dict[ReqId, Recycles] = field(default_factory=dict)
    live_words: dict[ReqId, LiveWords] = field(default_factory=dict)
    mass: dict[ReqId, MassOrder] = field(default_factory=dict)
    verify: PassChanges | None = None
