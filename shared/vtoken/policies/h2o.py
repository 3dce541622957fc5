"""Heavy hitters by cumulated attention."""

from vtoken.config import VTokenConfig
from vtoken.policies.base import MassNeed, RequestView
from vtoken.policies.ranking import RankedPolicy, Ranking

__all__ = ["H2OPolicy"]


class H2OPolicy(RankedPolicy):
    """H2O (Zhang et al., arXiv 2306.14048): keeps the tokens with the most attention so far, and the newest.

    The paper keeps its own set in each head and layer; here one sum over all heads and layers ranks whole tokens.
    Half of the budget is for the newest tokens, as in the paper, unless ``recent`` says otherwise: a newcomer
    starts at zero. ``decay`` below 1 lets old favourites fade (the paper never forgets).
    """

    name = "h2o"

    def mass_need(self, config: VTokenConfig) -> MassNeed:
        """One running sum, times ``config.decay`` at each query."""
        return MassNeed(decay=config.decay)

    def ranking(self, view: RequestView) -> Ranking:
        """The least cumulated mass goes; half of the budget is for the newest tokens."""
        return Ranking(recent=view.budget // 2)
