"""A policy's choice by attention mass, where the mass lies (SPEC A-3): ``lowest`` and ``smoothed`` on tensors."""

import torch
from torch import Tensor

from vtoken.policies.ranking import Choice
from vtoken.types import Position
from vtoken_torch.upload import upload

__all__ = ["above_mean", "lowest"]


def above_mean(rows: Tensor, is_seen: Tensor) -> Tensor:
    """In how many rows each token lies above the mean of those that the row's query sees.

    Args:
        rows: ``[num_queries, n]`` float64.
        is_seen: ``[num_queries, n]`` bool.

    Returns:
        ``[n]`` float64.
    """
    means = (rows * is_seen).sum(1, keepdim=True) / is_seen.sum(1, keepdim=True)
    return ((rows > means) & is_seen).sum(0).double()


def lowest(choice: Choice, scores: Tensor, positions: Tensor, is_known: Tensor) -> list[Position]:
    """The ``choice.count`` candidates with the lowest smoothed score, lowest first; ties go to the lower position.

    Waits for the device once.

    Args:
        choice: what is asked for.
        scores: ``[n]`` float64; not read where unknown.
        positions: ``[n]`` int64, ascending.
        is_known: ``[n]`` bool: tokens that have mass. They come first.
    """
    scores = _smoothed(scores.where(is_known, 0.0), positions, is_known, choice.smooth)
    edges = upload(choice.spans, positions.device).flatten()
    may_die = (torch.searchsorted(edges, positions, right=True) % 2 == 1) & is_known
    order = scores.masked_fill(~may_die, torch.inf).sort(stable=True).indices[: choice.count]
    chosen = positions[order].where(may_die[order], -1)
    return [int(position) for position in chosen.tolist() if position >= 0]


def _smoothed(scores: Tensor, positions: Tensor, is_known: Tensor, window: int) -> Tensor:
    """``vtoken.policies.base.smoothed`` of ``[n]`` scores that are zero where unknown."""
    if window == 1:
        return scores
    half = window // 2
    low = torch.searchsorted(positions, positions - half)
    high = torch.searchsorted(positions, positions + half, right=True)
    sums, counts = (_before(each.double()) for each in (scores, is_known))
    return (sums[high] - sums[low]) / (counts[high] - counts[low]).clamp(min=1)


def _before(values: Tensor) -> Tensor:
    """``[n + 1]``: the sum of the values before each place."""
    return torch.cat((values.new_zeros(1), values.cumsum(0)))
