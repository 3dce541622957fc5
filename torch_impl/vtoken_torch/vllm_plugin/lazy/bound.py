"""How many slots a request holds in lazy mode at most: its live tokens, and the holes that no plan closes.

Imports neither vLLM nor torch: the processes that take requests ask here too.
"""

from math import ceil

from vtoken.config import VTokenConfig

__all__ = ["headroom_blocks", "num_slots_with_holes"]


def num_slots_with_holes(config: VTokenConfig, num_live: int, block_size: int) -> int:
    """Slots of all blocks that a request with so many live tokens may be left with, one target at least being free.

    Either its fragmentation does not exceed ``theta_fragmentation``, or no two blocks fit into one: all but one source
    and the last block are fuller than ``source_utilization``, or than half, whichever is less.
    """
    least = min(int(config.source_utilization * block_size), block_size // 2) + 1
    if config.theta_fragmentation == 1:
        return num_live * block_size  # no plan is ever due; the caller knows how many tokens there are
    quiet = ceil(num_live / (1 - config.theta_fragmentation))
    return max(quiet, (num_live // least + 2) * block_size)


def headroom_blocks(config: VTokenConfig, num_blocks: int) -> int:
    """Blocks that admission keeps back for evacuation: its share of ``num_blocks``, and one at least."""
    if config.mode != "lazy" or config.variant != "vtoken":
        return 0
    return max(1, ceil(config.headroom * num_blocks))
