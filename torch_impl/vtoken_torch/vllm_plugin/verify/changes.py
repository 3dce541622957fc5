"""What verification sends between the two sides: token changes to the workers, findings back."""

from collections.abc import Set
from dataclasses import dataclass, field
from typing import Self

from vtoken.invariants import Violation
from vtoken.types import BlockId, Move, Position, ReqId, SlotId

__all__ = ["FINDINGS", "Changes", "Finding", "PassChanges"]

FINDINGS = "vtoken_findings"
"""Name under which a worker's findings hang on vLLM's ``ModelRunnerOutput``."""


@dataclass
class Changes:
    """What one pass did to one request's tokens.

    Attributes:
        is_start: admitted or rebuilt in this pass: nothing from before counts.
        dead: positions that died.
        moves: copies of tokens that live on.
        first_new: the first position that joins; ``new_slots`` are the slots from there on.
        num_cached: so many of the new ones have their KV already (prefix cache); the step writes the others.
        num_left_out: dead tokens that lengths and slots leave out from this step on.
    """

    is_start: bool
    dead: list[Position]
    moves: list[Move]
    first_new: Position
    new_slots: list[SlotId]
    num_cached: int
    num_left_out: int


@dataclass
class PassChanges:
    """All of one pass.

    Attributes:
        requests: by request.
        gone: requests that ended or were preempted since the last one.
        recycled: requests whose token goes over a dead one.
    """

    requests: dict[ReqId, Changes] = field(default_factory=dict)
    gone: list[ReqId] = field(default_factory=list)
    recycled: Set[ReqId] = frozenset()


@dataclass(frozen=True)
class Finding:
    """One violated invariant, as it is logged and reported."""

    number: int
    req_id: ReqId | None
    what: str
    expected: str
    found: str
    slots: tuple[SlotId, ...] = ()
    block_id: BlockId | None = None

    @classmethod
    def of(cls, violation: Violation) -> Self:
        """The same as plain data, which travels between processes."""
        return cls(
            violation.number,
            violation.req_id,
            violation.where,
            str(violation.expected),
            str(violation.got),
            violation.slots,
            violation.block_id,
        )

    def __str__(self) -> str:
        return f"INV-{self.number}: {self.what}: expected {self.expected}, found {self.found}"
