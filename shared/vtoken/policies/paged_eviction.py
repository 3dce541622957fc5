"""Whole pages by mean score: the baseline that needs no compaction."""

from collections.abc import Sequence

from vtoken.policies.base import Policy, RequestView, Signal, evictable, num_victims, smoothed
from vtoken.types import Position, cdiv

__all__ = ["PagedEvictionPolicy"]


class PagedEvictionPolicy(Policy):
    """PagedEviction (Chitty-Venkata et al., arXiv 2509.04377): drops the pages with the lowest mean score.

    A page is ``page_size`` positions from a multiple of it on, all live. It goes as a whole or not at all: the page
    still being filled, and any page with a sink, a protected, a recent or an unscored token, stays. Up to a page
    more than the excess goes. The paper scores a token by the norms of its value and key; here it is the cumulated
    attention mass over all heads and layers. The newest page stays unless ``recent`` says otherwise.
    """

    name = "paged_eviction"
    signals = frozenset({Signal.ATTENTION_MASS})

    def select_victims(self, view: RequestView) -> Sequence[Position]:
        """The pages with the least mean mass, enough of them to meet the budget."""
        size, scores = view.config.page_size, smoothed(view, view.mass)
        usable = [i for i in evictable(view, recent=size) if scores[i] == scores[i]]
        positions = [view.live_positions[i] for i in usable]
        starts = [  # positions ascend and differ, so that a page is whole if its first and last place fit
            k
            for k in range(len(positions) - size + 1)
            if positions[k] % size == 0 and positions[k + size - 1] == positions[k] + size - 1
        ]
        means = {positions[k]: sum(scores[i] for i in usable[k : k + size]) / size for k in starts}
        pages = sorted(means, key=means.__getitem__)[: cdiv(num_victims(view), size)]
        return [position for first in sorted(pages) for position in range(first, first + size)]
