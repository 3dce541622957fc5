"""What a continuous-batching loop asks of a framework: arrays for the KV, and one forward pass over a packed batch."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from vtoken.errors import SpecError
from vtoken.executor import KVSpec
from vtoken.paged_executor import KVStore
from vtoken.policies.base import MassNeed
from vtoken.policies.ranking import Choice
from vtoken.types import Position, SlotId

__all__ = ["ModelRunner", "RanksOnDevice", "SamplingParams", "StepRow"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How one request's tokens are chosen, and when it ends.

    Attributes:
        max_tokens: output tokens at most.
        temperature: 0 is greedy.
        top_k: choose among this many of the likeliest; 0 is all.
        seed: of the request's own random draws; draw i depends on the seed and on i alone, never on the batch.
        stop_token_ids: the request ends with one of these (it is part of the output).
    """

    max_tokens: int = 64
    temperature: float = 0.0
    top_k: int = 0
    seed: int = 0
    stop_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.max_tokens < 1:
            raise SpecError(f"max_tokens={self.max_tokens}: give at least 1")
        if self.temperature < 0:
            raise SpecError(f"temperature={self.temperature}: give 0 (greedy) or more")
        if self.top_k < 0:
            raise SpecError(f"top_k={self.top_k}: give a whole number of tokens, or 0 for all")


@dataclass(frozen=True, slots=True)
class StepRow:
    """One request's part of a step.

    Attributes:
        row: its row in the store's tables, which hold this step's tokens already.
        token_ids: inputs, a prefill chunk or one token.
        start: position of the first one; positions go on from there, whatever was evicted.
        slots: where each token's KV goes. Tokens of one step may be the victims' successors (recycled slots).
        sampling: of the token that follows; None where the prompt goes on.
        num_sampled: output tokens so far: the index of the next draw.
    """

    row: int
    token_ids: Sequence[int]
    start: Position
    slots: Sequence[SlotId]
    sampling: SamplingParams | None
    num_sampled: int = 0


class ModelRunner(Protocol):
    """A model on one device, with its KV pool.

    Calls come in order from one thread. The store's writes (tables, moves) that come before a ``step`` are seen by it.
    """

    def make_store(self, spec: KVSpec) -> KVStore:
        """Allocates the pool that ``step`` reads and writes; ``spec.num_layers`` and so on are the model's."""
        ...

    def collect_mass(self, need: MassNeed) -> None:
        """From here on keeps every request's attention mass as a policy needs it, on the device; asked once at most."""
        ...

    def step(self, rows: Sequence[StepRow]) -> list[int]:
        """One forward pass: writes the tokens' KV and positions into their slots, then attends over live tokens.

        A query sees the live tokens of its row at its position or before. Returns the sampled token of each row that
        has ``sampling``, in order.
        """
        ...

    def scores(self, row: int, positions: Sequence[Position]) -> tuple[Sequence[float], Sequence[Sequence[float]]]:
        """``mass`` and ``mass_rows`` of a ``RequestView`` with these live positions, brought to the host."""
        ...

    def forget(self, row: int) -> None:
        """The row's request has ended or was preempted: its mass is no more. The row's next request starts at zero."""
        ...


@runtime_checkable
class RanksOnDevice(Protocol):
    """A ``ModelRunner`` that also chooses by mass where the mass lies: only victims come to the host.

    Asked in place of ``scores`` for policies that are a ranking (``vtoken.policies.RankedPolicy``).
    """

    def lowest(self, row: int, positions: Sequence[Position] | None, choice: Choice) -> Sequence[Position]:
        """The ``choice.count`` candidates with the lowest score, ascending; ties go to the lower position.

        Candidates are ``positions`` (ascending), or all live tokens of the row if that is None. One without mass yet,
        or outside ``choice.spans``, is not chosen. Equal to the host's choice for equal scores.
        """
        ...
