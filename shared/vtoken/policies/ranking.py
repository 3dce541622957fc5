"""Choice by score, declared: one rule that the host applies to a view, and a device to the mass that it keeps."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf, isnan, nan
from typing import Literal

from vtoken.policies.base import Policy, RequestView, Signal, evictable_spans, lowest, smoothed
from vtoken.types import Position

__all__ = ["Choice", "RankedPolicy", "Ranking", "Score"]

Score = Literal["mass", "above_mean"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranking:
    """How a policy ranks: the tokens with the lowest smoothed score go, ties to the lower position.

    Attributes:
        score: ``mass``, the sum as ``MassNeed`` keeps it; ``above_mean``, in how many rows of the window a token's
            mass lies above the mean over the candidates which that query sees.
        recent: the policy's own choice of newest tokens to keep, as in ``evictable``.
        smooth: the policy's own window, as in ``smoothed``.
    """

    score: Score = "mass"
    recent: int = 0
    smooth: int = 1


@dataclass(frozen=True, slots=True)
class Choice:
    """One choice in plain numbers: all that a device needs beside the mass.

    Attributes:
        count: tokens wanted; fewer if fewer may be chosen; 0 is none.
        score: as in ``Ranking``.
        smooth: odd window of positions, 1 is off: a score is averaged over the candidates at most ``smooth // 2``
            positions away, those without mass left out.
        spans: half-open position ranges, ascending and disjoint: a token outside them stays.
    """

    count: int
    score: Score
    smooth: int
    spans: tuple[tuple[Position, Position], ...]


class RankedPolicy(Policy):
    """A policy that is a ranking of attention mass and nothing else, so that the mass may stay on the device."""

    signals = frozenset({Signal.ATTENTION_MASS})

    def ranking(self, view: RequestView) -> Ranking | None:
        """The rule at this count, from counts and config alone (``live_positions`` may be empty); None: nobody dies."""
        raise NotImplementedError(f"{type(self).__name__} lacks ranking: return a Ranking from it")

    def select_victims(self, view: RequestView) -> Sequence[Position]:
        """The tokens with the lowest scores."""
        ranking = self.ranking(view)
        if ranking is None:
            return ()
        scores = view.mass if ranking.score == "mass" else times_above_mean(view)
        return lowest(view, smoothed(view, scores, ranking.smooth), ranking.recent)

    def choice(self, view: RequestView, num_candidates: int) -> Choice | None:
        """The same choice for a device that holds ``num_candidates``; ``view.live_positions`` may be empty."""
        ranking = self.ranking(view)
        count = num_candidates - view.budget
        if ranking is None or count <= 0:
            return None
        smooth = ranking.smooth if view.config.smooth is None else view.config.smooth
        return Choice(count, ranking.score, smooth, tuple(evictable_spans(view, ranking.recent)))


def times_above_mean(view: RequestView) -> list[float]:
    """In how many of ``mass_rows`` each token lies above the row's mean; NaN where it has no mass yet."""
    counts = [0.0 if mass == mass else nan for mass in view.mass]
    for row in view.mass_rows:
        seen = len(row)
        while seen and isnan(row[seen - 1]):  # tokens newer than the query come last
            seen -= 1
        mean = sum(row[:seen]) / seen if seen else inf
        for i in [i for i, mass in enumerate(row) if mass > mean]:
            counts[i] += 1
    return counts
