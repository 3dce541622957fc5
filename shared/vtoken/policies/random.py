"""A seeded random choice."""

import sys
from array import array
from collections.abc import Sequence

from vtoken.fingerprint import fmix32
from vtoken.policies.base import Policy, RequestView, lowest
from vtoken.types import Position

__all__ = ["RandomPolicy"]


class RandomPolicy(Policy):
    """Uniform choice: the control that any score must beat, and the most scattered victims (no paper of its own).

    A draw is a hash of (seed modulo 2**32, position, computed count), never of the request's id or layout, so that
    every engine draws the same. One draw serves all heads. The newest 10 % of the budget stay unless ``recent`` says
    otherwise.
    """

    name = "random"

    def select_victims(self, view: RequestView) -> Sequence[Position]:
        """The tokens with the lowest draws. ``smooth`` has no meaning here."""
        key = fmix32(view.num_computed_tokens ^ fmix32(view.config.seed & 0xFFFFFFFF))
        return lowest(view, draws(view.live_positions, key), recent=view.budget // 10)


def draws(positions: Sequence[Position], key: int) -> list[int]:
    """``fmix32(position ^ key)`` of every position, all at once.

    The positions are 64-bit lanes of one big integer: a product of two 32-bit numbers never leaves its lane, and
    the mask drops what a shift brings in. Some four times as fast as a loop. No two positions draw the same.
    """
    ones = int.from_bytes(array("Q", [1]) * len(positions), sys.byteorder)
    mask = ones * 0xFFFFFFFF
    lanes = int.from_bytes(array("Q", positions), sys.byteorder) ^ (ones * key)
    lanes = ((lanes ^ (lanes >> 16 & mask)) * 0x85EBCA6B) & mask
    lanes = ((lanes ^ (lanes >> 13 & mask)) * 0xC2B2AE35) & mask
    lanes ^= lanes >> 16 & mask
    return array("Q", lanes.to_bytes(8 * len(positions), sys.byteorder)).tolist()
