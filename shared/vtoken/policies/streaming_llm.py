"""Attention sinks and the newest tokens."""

from collections.abc import Sequence
from itertools import islice

from vtoken.policies.base import Policy, RequestView, evictable, num_victims
from vtoken.types import Position

__all__ = ["StreamingLLMPolicy"]


class StreamingLLMPolicy(Policy):
    """StreamingLLM (Xiao et al., arXiv 2309.17453): keeps the first ``num_sinks`` tokens and the newest ones.

    The paper's rule is the same for every head, so that per-head and per-token agree. It differs in the positions:
    the paper rotates keys by their place in the cache, vToken never rotates a key again.
    """

    name = "streaming_llm"

    def select_victims(self, view: RequestView) -> Sequence[Position]:
        """The oldest tokens after the sinks."""
        return [view.live_positions[i] for i in islice(evictable(view), num_victims(view))]
