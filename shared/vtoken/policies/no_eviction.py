"""Nothing is evicted."""

from collections.abc import Sequence

from vtoken.policies.base import Policy, RequestView
from vtoken.types import Position

__all__ = ["NoEvictionPolicy"]


class NoEvictionPolicy(Policy):
    """Keeps every token, whatever the budget: the engine as it is (variant ``native``). No paper, no heads."""

    name = "none"

    def select_victims(self, view: RequestView) -> Sequence[Position]:
        """Nothing."""
        return ()
