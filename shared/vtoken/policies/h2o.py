"""Heavy hitters by cumulated attention."""

from collections.abc import Sequence

from vtoken.config import VTokenConfig
from vtoken.policies.base import MassNeed, Policy, RequestView, Signal, lowest, smoothed
from vtoken.types import Position

__all__ = ["H2OPolicy"]


class H2OPolicy(Policy):
    """H2O (Zhang et al., arXiv 2306.14048): keeps the tokens with the most attention so far, and the newest.

    The paper keeps its own set in each head and layer; here one sum over all heads and layers ranks whole tokens.
    Half of the budget is for the newest tokens, as in the paper, unless ``recent`` says otherwise: a newcomer
    starts at zero. ``decay`` below 1 lets old favourites fade (the paper never forgets).
    """

    name = "h2o"
    signals = frozenset({Signal.ATTENTION_MASS})

    def mass_need(self, config: VTokenConfig) -> MassNeed:
        """One running sum, times ``config.decay`` at each query."""
        return MassNeed(decay=config.decay)

    def select_victims(self, view: RequestView) -> Sequence[Position]:
        """The tokens with the least cumulated mass."""
        return lowest(view, smoothed(view, view.mass), recent=view.budget // 2)
