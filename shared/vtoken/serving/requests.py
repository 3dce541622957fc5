"""One request of the loop, what it returns, and how far a run is."""

import operator
import reprlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, Self

from vtoken.errors import SpecError
from vtoken.serving.protocol import SamplingParams
from vtoken.types import ReqId

__all__ = ["FinishReason", "Output", "Progress", "Request", "checked_tokens"]

FinishReason = Literal["stop", "length", "abort", "exhausted", "error"]
"""A stop token, the most tokens, aborted, the pool cannot hold it even alone, or its step raised."""


@dataclass(frozen=True, slots=True)
class Output:
    """What became of one prompt.

    Attributes:
        token_ids: output tokens, a stop token included.
        finish_reason: see ``FinishReason``.
        num_prompt_tokens: tokens of the prompt.
        num_evicted: tokens of prompt and output that were dead at its end.
        num_preemptions: how often its KV was dropped and rebuilt.
    """

    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    num_prompt_tokens: int
    num_evicted: int
    num_preemptions: int


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a ``generate`` is. ``max_output_tokens`` is a bound: it shrinks as requests end early."""

    num_finished: int
    num_requests: int
    num_output_tokens: int
    max_output_tokens: int

    @classmethod
    def of(cls, requests: "Sequence[Request]") -> Self:
        """The sum over these requests."""
        ended = [request for request in requests if request.finish_reason]
        num_output = sum(len(request.output) for request in requests)
        left = sum(
            request.sampling.max_tokens - len(request.output) for request in requests if not request.finish_reason
        )
        return cls(len(ended), len(requests), num_output, num_output + left)


@dataclass(slots=True, eq=False)
class Request:
    """A request from submission to its end.

    Attributes:
        index: submission index, its ``trace_key``.
        prefill_to: count up to which its tokens are written in chunks: its prompt, or after a preemption all that it
            had computed.
        computed: tokens whose slots it has, those of the step that runs included.
        preempted_at: its count at the last preemption.
    """

    index: int
    prompt: tuple[int, ...]
    sampling: SamplingParams
    prefill_to: int
    output: list[int] = field(default_factory=list)
    computed: int = 0
    finish_reason: FinishReason | None = None
    num_evicted: int = 0
    num_preemptions: int = 0
    preempted_at: int = -1

    @property
    def req_id(self) -> ReqId:
        """Its name in tables."""
        return str(self.index)

    @property
    def max_computed(self) -> int:
        """Tokens that it computes at most: the last output token is never an input."""
        return len(self.prompt) + self.sampling.max_tokens - 1

    @property
    def num_known(self) -> int:
        """Tokens of prompt and output so far."""
        return len(self.prompt) + len(self.output)

    def tokens(self, start: int, end: int) -> tuple[int, ...]:
        """Tokens at positions ``start`` to ``end``."""
        split = len(self.prompt)
        if end <= split:
            return self.prompt[start:end]
        return (*self.prompt[start:], *self.output[max(0, start - split) : end - split])

    def num_next(self, chunk_tokens: int) -> int:
        """Tokens of its next step. Chunks end at multiples of ``chunk_tokens``, whatever else runs."""
        if self.computed >= self.prefill_to:
            return 1
        return min(chunk_tokens - self.computed % chunk_tokens, self.prefill_to - self.computed)

    def take(self, token_id: int) -> None:
        """Takes a sampled token; sets the reason if it is the last."""
        self.output.append(token_id)
        if token_id in self.sampling.stop_token_ids:
            self.finish_reason = "stop"
        elif len(self.output) >= self.sampling.max_tokens:
            self.finish_reason = "length"

    def restart(self) -> None:
        """Its KV is gone: what it had computed is written again, in chunks."""
        self.preempted_at = self.computed
        self.prefill_to = max(self.prefill_to, self.computed)
        self.computed = 0
        self.num_preemptions += 1

    def as_output(self) -> Output:
        """What it returns at its end."""
        reason = self.finish_reason or "abort"
        return Output(tuple(self.output), reason, len(self.prompt), self.num_evicted, self.num_preemptions)


def checked_tokens(where: str, prompt: Sequence[int], vocab_size: int | None) -> tuple[int, ...]:
    """A prompt as plain integers, or a SpecError that begins with ``where``."""
    try:
        token_ids = tuple(map(operator.index, prompt))
    except TypeError:
        raise SpecError(f"{where} is {reprlib.repr(prompt)}: give token ids, whole numbers") from None
    if not token_ids:
        raise SpecError(f"{where} is empty: give at least 1 token")
    low, high = min(token_ids), max(token_ids)
    if low < 0 or (vocab_size is not None and high >= vocab_size):
        bound = "" if vocab_size is None else f", below vocab_size={vocab_size}"
        raise SpecError(f"{where} has token ids {low} to {high}: give ids of at least 0{bound}")
    return token_ids
