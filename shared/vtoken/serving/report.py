"""What an observer is shown of each pass."""

from dataclasses import dataclass

from vtoken.reclamation.plan import ReclamationPlan
from vtoken.serving.protocol import StepRow

__all__ = ["StepReport"]


@dataclass(frozen=True, slots=True)
class StepReport:
    """One pass, as it stands after the forward and before deaths: for tests, benches and timelines.

    Attributes:
        rows: what the forward was given, with the submission index of each.
        plans: launched in this pass, before the forward.
        held_blocks, free_blocks, in_flight_blocks: the pool.
        num_waiting: requests in the queue.
    """

    rows: tuple[tuple[int, StepRow], ...]
    plans: tuple[ReclamationPlan, ...]
    held_blocks: int
    free_blocks: int
    in_flight_blocks: int
    num_waiting: int
