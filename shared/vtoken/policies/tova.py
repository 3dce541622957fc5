"""Least attention from the last query."""

from vtoken.config import VTokenConfig
from vtoken.policies.base import MassNeed, RequestView
from vtoken.policies.ranking import RankedPolicy, Ranking

__all__ = ["TOVAPolicy"]


class TOVAPolicy(RankedPolicy):
    """TOVA (Oren et al., arXiv 2401.06104): drops what the last query looks at least; no sinks or window of its own.

    The paper averages over the heads of each layer and drops layer by layer, one token a step; here one row over
    all heads and layers ranks whole tokens, and ``interval`` sets how many go at once. Only the newest token is
    kept for being new, unless ``recent`` says otherwise.
    """

    name = "tova"

    def mass_need(self, config: VTokenConfig) -> MassNeed:
        """The last row alone."""
        return MassNeed(window=1)

    def ranking(self, view: RequestView) -> Ranking:
        """The least mass in the last row goes."""
        return Ranking(recent=1)
