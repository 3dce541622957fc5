"""Attention of the last queries of the prompt, pooled over neighbours."""

from vtoken.config import VTokenConfig
from vtoken.policies.base import MassNeed, RequestView
from vtoken.policies.ranking import RankedPolicy, Ranking

__all__ = ["SnapKVPolicy"]

_HISTORY = 32
_POOL = 7


class SnapKVPolicy(RankedPolicy):
    """SnapKV (Li et al., arXiv 2404.14469): keeps what the last ``history`` (32) queries look at, in spans.

    The paper chooses once, after the prompt, in each head and layer. Here one sum over all heads and layers ranks
    whole tokens, and the same rule goes on during decoding with the newest queries, so that the budget holds. Until
    the prompt is computed nothing is evicted. Scores are pooled over 7 neighbours (mean; ``smooth`` changes it). The
    observation window itself stays, up to half of the budget, unless ``recent`` says otherwise.
    """

    name = "snapkv"

    def mass_need(self, config: VTokenConfig) -> MassNeed:
        """The sum over the last ``history`` queries."""
        return MassNeed(window=config.history or _HISTORY)

    def ranking(self, view: RequestView) -> Ranking | None:
        """The least pooled mass in the window goes; nobody during prefill."""
        if view.num_computed_tokens < view.prompt_len:
            return None
        recent = min(view.config.history or _HISTORY, view.budget // 2)
        return Ranking(recent=recent, smooth=_POOL)
