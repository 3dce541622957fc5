"""What a policy sees and what the policies share: view, signals, budget, smoothing, choice."""

import heapq
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import chain
from math import inf, nan
from typing import Protocol

from vtoken.config import VTokenConfig
from vtoken.errors import SpecError
from vtoken.types import Position

__all__ = [
    "MassNeed",
    "Policy",
    "RequestView",
    "Signal",
    "evictable",
    "evictable_spans",
    "lowest",
    "num_victims",
    "smoothed",
]


class Signal(Enum):
    """What the runtime must collect for a policy."""

    ATTENTION_MASS = "attention_mass"
    KEY_NORM = "key_norm"


@dataclass(frozen=True, slots=True)
class MassNeed:
    """How the runtime keeps attention mass for a policy (``vtoken.policies.MassRecorder`` does it).

    A query's mass row is the attention that it pays to each live token: summed over query heads, mean over layers,
    float32. The policy gets the sum of the rows of the last ``window`` queries, or of all queries if ``window`` is 0
    (the sum so far times ``decay`` at each query). With ``rows`` it also gets each row of the window: much more to
    keep and to hand over, so ask for it only where a sum does not do.
    """

    window: int = 0
    decay: float = 1.0
    rows: bool = False

    def __post_init__(self) -> None:
        if self.window < 0:
            raise SpecError(f"window={self.window}: give a number of queries, or 0 for one running sum")
        if not 0 <= self.decay <= 1:
            raise SpecError(f"decay={self.decay}: give a factor between 0 and 1 (1 never forgets)")
        if self.rows and not self.window:
            raise SpecError("rows=True needs a window: say how many queries back")


@dataclass(frozen=True, slots=True)
class RequestView:
    """One request as a policy sees it: positions and scores, never blocks, slots or time.

    Attributes:
        num_computed_tokens: KV written so far, evicted tokens included.
        prompt_len: tokens of the prompt.
        live_positions: ascending; doomed tokens are left out.
        config: budgets, sinks, protected ranges, seed.
        mass: the sum that ``MassNeed`` asks for, aligned with ``live_positions``; NaN where a token has no mass yet.
        mass_rows: the last ``window`` rows, newest last, each aligned with ``live_positions``; NaN where the query
            came before the token (``MassNeed.rows``).
    """

    num_computed_tokens: int
    prompt_len: int
    live_positions: Sequence[Position]
    config: VTokenConfig
    mass: Sequence[float] = ()
    mass_rows: Sequence[Sequence[float]] = ()

    def __post_init__(self) -> None:
        for row in self.mass_rows:
            if len(row) != len(self.mass):
                raise SpecError(f"a mass row of {len(row)} beside a mass of {len(self.mass)} tokens: align both")

    @property
    def budget(self) -> int:
        """Tokens to keep at this count."""
        return self.config.budget_tokens(self.num_computed_tokens)


class Policy(Protocol):
    """Decides which tokens die. Deterministic: the same view gives the same victims; ties go to the lower position.

    Any object of this shape is a policy. Subclassing it says so to the type checker and brings the defaults.
    """

    name: str
    signals: frozenset[Signal] = frozenset()

    def mass_need(self, config: VTokenConfig) -> MassNeed:
        """How mass is kept; asked only if ``signals`` holds ``ATTENTION_MASS``."""
        return MassNeed()

    def select_victims(self, view: RequestView) -> Sequence[Position]:
        """Positions to evict, ascending, all of them live in ``view``. Mutates nothing."""
        ...


def num_victims(view: RequestView) -> int:
    """How many live tokens exceed the budget."""
    return max(0, len(view.live_positions) - view.budget)


def evictable(view: RequestView, recent: int = 0, sinks: int | None = None) -> Iterator[int]:
    """Ascending indices into ``live_positions`` that may be chosen: no sink, not protected, not recent.

    Args:
        view: the request.
        recent: the policy's own choice of newest tokens to keep; it gives way where it and the sinks would exceed
            the budget, and ``config.recent`` replaces it. Counted in positions back from the computed count:
            recency goes by position, never by slot.
        sinks: replaces ``config.num_sinks``, for a policy that has none by definition.
    """
    positions = view.live_positions
    return chain.from_iterable(
        range(bisect_left(positions, low), bisect_left(positions, high))
        for low, high in evictable_spans(view, recent, sinks)
    )


def evictable_spans(
    view: RequestView, recent: int = 0, sinks: int | None = None
) -> Iterator[tuple[Position, Position]]:
    """The half-open position ranges behind ``evictable``, ascending and disjoint; reads no live position."""
    config = view.config
    start = config.num_sinks if sinks is None else sinks
    recent = min(recent, max(0, view.budget - start)) if config.recent is None else config.recent
    end = view.num_computed_tokens - recent
    protected = ((0, view.prompt_len),) if config.protected == "prompt" else config.protected
    for low, high in (*sorted(protected), (end, end)):
        if start < min(low, end):
            yield start, min(low, end)
        start = max(start, high)


def lowest(view: RequestView, scores: Sequence[float], recent: int = 0) -> list[Position]:
    """The victims by lowest score, ascending by position. A token whose score is NaN has no mass yet and stays.

    ``scores`` is aligned with ``live_positions``; ``recent`` as in ``evictable``.
    """
    _check_aligned(view, scores)
    positions = view.live_positions
    wanted = num_victims(view)
    candidates = [i for i in evictable(view, recent) if scores[i] == scores[i]]
    if wanted * 8 < len(candidates):  # a heap wins while few are wanted; both orders are stable, so ties go low
        chosen = heapq.nsmallest(wanted, candidates, key=scores.__getitem__)
    else:
        chosen = sorted(candidates, key=scores.__getitem__)[:wanted]
    return [positions[i] for i in sorted(chosen)]


def smoothed(view: RequestView, scores: Sequence[float], window: int = 1) -> Sequence[float]:
    """Each score averaged over the live tokens at most ``window // 2`` positions away; NaN neighbours do not count.

    Raw token scores tear spans apart and lose retrieval; pooling as in SnapKV (arXiv 2404.14469) keeps spans whole.
    ``window`` is the policy's own choice (odd, 1 is off); ``config.smooth`` goes before it.
    """
    _check_aligned(view, scores)
    window = window if view.config.smooth is None else view.config.smooth
    if window == 1:
        return scores
    half = window // 2
    known = [i for i, score in enumerate(scores) if score == score]
    values = [scores[i] for i in known]
    places: list[float] = [view.live_positions[i] for i in known]
    result = [nan] * len(scores)
    low = high = 0
    ends = [*places, inf]
    for i, place in zip(known, places, strict=True):
        while ends[low] < place - half:
            low += 1
        while ends[high] <= place + half:
            high += 1
        result[i] = sum(values[low:high]) / (high - low)
    return result


def _check_aligned(view: RequestView, scores: Sequence[float]) -> None:
    if len(scores) != len(view.live_positions):
        raise SpecError(
            f"{len(scores)} scores for {len(view.live_positions)} live tokens: give one for each, NaN where unknown"
        )
