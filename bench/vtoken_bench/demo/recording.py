"""What one run of a model leaves behind: every token's KV bytes, and the attention mass of every step."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from vtoken.errors import SpecError
from vtoken.executor import KVSpec
from vtoken.policies import MassNeed, MassRecorder
from vtoken.types import Position

__all__ = ["KEPT_ROWS", "Floats", "RecordedMass", "Recording", "Step"]

Floats = npt.NDArray[np.float32]

KEPT_ROWS = 32
"""Mass rows kept of each prefill chunk: the longest window that a policy may ask for."""


@dataclass(frozen=True, slots=True)
class Step:
    """One forward: it wrote positions ``[start, end)``, a prefill chunk or one decoded token.

    Attributes:
        start, end: positions.
        is_chunk: a prefill chunk, even of one token.
        mass: float32 ``[end]``: attention paid to each position, summed over the step's queries (SPEC A-3).
        last_rows: float32 ``[min(end - start, KEPT_ROWS), end]``: the newest queries one by one; zero behind each.
    """

    start: Position
    end: Position
    is_chunk: bool
    mass: Floats
    last_rows: Floats

    @property
    def num_tokens(self) -> int:
        """Tokens written, which is the number of queries."""
        return self.end - self.start


@dataclass(frozen=True, slots=True)
class Recording:
    """One recorded run. ``kv`` is float32 ``[num_tokens, num_layers, 2 (K, V), num_kv_heads, head_size]``."""

    token_ids: tuple[int, ...]
    prompt_len: int
    num_query_heads: int
    kv: Floats
    steps: tuple[Step, ...]

    @property
    def num_tokens(self) -> int:
        """Computed tokens: prompt and output."""
        return len(self.kv)

    def spec(self, block_size: int, num_blocks: int) -> KVSpec:
        """A pool for one request of this run; ``num_blocks`` without the null block."""
        _, num_layers, _, num_kv_heads, head_size = self.kv.shape
        return KVSpec(
            num_layers=num_layers,
            num_kv_heads=num_kv_heads,
            num_query_heads=self.num_query_heads,
            head_size=head_size,
            dtype="float32",
            block_size=block_size,
            num_blocks=num_blocks + 1,
            max_num_reqs=1,
        )

    def bytes_of(self, start: Position, end: Position) -> memoryview:
        """KV of positions ``[start, end)`` in canonical order; no copy."""
        return self.kv[start:end].reshape(-1).view(np.uint8).data


class RecordedMass:
    """``Scores`` for ``PolicyVictims`` from a recording: what a policy would have seen at each step.

    The recorded queries saw all tokens; what they paid to a token that is dead by now is left out.
    """

    def __init__(self, need: MassNeed) -> None:
        if need.window > KEPT_ROWS:
            raise SpecError(f"the policy wants the last {need.window} mass rows, {KEPT_ROWS} are kept: shorten history")
        self._recorder = MassRecorder(need)
        self._by_row = need.window > 0

    def feed(self, step: Step) -> None:
        """Takes the next step's mass."""
        if self._by_row:
            first = step.end - len(step.last_rows)
            for end, row in enumerate(step.last_rows, start=first + 1):
                self._recorder.observe(range(end), row[:end].tolist())
        else:
            self._recorder.observe_sum(range(step.end), step.mass.tolist(), step.num_tokens)

    def __call__(
        self, trace_key: int, positions: Sequence[Position]
    ) -> tuple[Sequence[float], Sequence[Sequence[float]]]:
        return self._recorder.scores(positions)
