"""Least attention from the last query."""

from collections.abc import Sequence

from vtoken.config import VTokenConfig
from vtoken.policies.base import MassNeed, Policy, RequestView, Signal, lowest, smoothed
from vtoken.types import Position

__all__ = ["TOVAPolicy"]


class TOVAPolicy(Policy):
    """TOVA (Oren et al., arXiv 2401.06104): drops what the last query looks at least; no sinks or window of its own.

    The paper averages over the heads of each layer and drops layer by layer, one token a step; here one row over
    all heads and layers ranks whole tokens, and ``interval`` sets how many go at once. Only the newest token is
    kept for being new, unless ``recent`` says otherwise.
    """

    name = "tova"
    signals = frozenset({Signal.ATTENTION_MASS})

    def mass_need(self, config: VTokenConfig) -> MassNeed:
        """The last row alone."""
        return MassNeed(window=1)

    def select_victims(self, view: RequestView) -> Sequence[Position]:
        """The tokens with the least mass in the last row."""
        return lowest(view, smoothed(view, view.mass), recent=1)
