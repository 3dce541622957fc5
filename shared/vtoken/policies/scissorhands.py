"""Persistence of importance over a history window."""

from collections.abc import Sequence
from math import inf, isnan, nan

from vtoken.config import VTokenConfig
from vtoken.policies.base import MassNeed, Policy, RequestView, Signal, lowest, smoothed
from vtoken.types import Position

__all__ = ["ScissorhandsPolicy"]

_HISTORY = 16


class ScissorhandsPolicy(Policy):
    """Scissorhands (Liu et al., arXiv 2305.17118): keeps what was important again and again.

    Importance: in how many of the last ``history`` (16) query rows the token was above the row's mean. The paper
    counts in each head and layer; here rows over all heads and layers count whole tokens. Ties go to the older
    token. The newest 10 % of the budget stay unless ``recent`` says otherwise.
    """

    name = "scissorhands"
    signals = frozenset({Signal.ATTENTION_MASS})

    def mass_need(self, config: VTokenConfig) -> MassNeed:
        """The rows of the last ``history`` queries."""
        return MassNeed(window=config.history or _HISTORY, rows=True)

    def select_victims(self, view: RequestView) -> Sequence[Position]:
        """The tokens that were above the mean least often."""
        counts = [0.0 if mass == mass else nan for mass in view.mass]
        for row in view.mass_rows:
            seen = len(row)
            while seen and isnan(row[seen - 1]):  # tokens newer than the query come last
                seen -= 1
            mean = sum(row[:seen]) / seen if seen else inf
            for i in [i for i, mass in enumerate(row) if mass > mean]:
                counts[i] += 1
        return lowest(view, smoothed(view, counts), recent=view.budget // 10)
