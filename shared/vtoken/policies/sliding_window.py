"""The newest tokens alone."""

from collections.abc import Sequence
from itertools import islice

from vtoken.policies.base import Policy, RequestView, evictable, num_victims
from vtoken.types import Position

__all__ = ["SlidingWindowPolicy"]


class SlidingWindowPolicy(Policy):
    """Window attention (Longformer, Beltagy et al., arXiv 2004.05150): keeps the newest tokens, and no sinks.

    ``num_sinks`` is ignored: without the first tokens many models stop making sense at once, which is what this
    baseline shows. The rule is the same for every head, so that per-head and per-token agree.
    """

    name = "sliding_window"

    def select_victims(self, view: RequestView) -> Sequence[Position]:
        """The oldest tokens."""
        return [view.live_positions[i] for i in islice(evictable(view, sinks=0), num_victims(view))]
