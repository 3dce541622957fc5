"""Persistence of importance over a history window."""

from vtoken.config import VTokenConfig
from vtoken.policies.base import MassNeed, RequestView
from vtoken.policies.ranking import RankedPolicy, Ranking

__all__ = ["ScissorhandsPolicy"]

_HISTORY = 16


class ScissorhandsPolicy(RankedPolicy):
    """Scissorhands (Liu et al., arXiv 2305.17118): keeps what was important again and again.

    Importance: in how many of the last ``history`` (16) query rows the token was above the row's mean. The paper
    counts in each head and layer; here rows over all heads and layers count whole tokens. Ties go to the older
    token. The newest 10 % of the budget stay unless ``recent`` says otherwise.
    """

    name = "scissorhands"

    def mass_need(self, config: VTokenConfig) -> MassNeed:
        """The rows of the last ``history`` queries."""
        return MassNeed(window=config.history or _HISTORY, rows=True)

    def ranking(self, view: RequestView) -> Ranking:
        """The tokens that were above the mean least often go."""
        return Ranking(score="above_mean", recent=view.budget // 10)
