"""Attention that nobody computed: scores with the shape of measured ones, for policies that need attention mass.

A token has a weight w = exp(sigma z), z an AR(1) series along the sequence, so that important tokens come in clusters;
a query with t computed tokens pays w / t to each. Cumulated from the token's own step to the n-th, that is
w ln(n / position). These are assumptions, not measurements: they decide which tokens die, hence how scattered the
holes are. How many die is the budget's business.
"""

from collections.abc import Sequence
from itertools import accumulate
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from vtoken.policies import MassNeed
from vtoken.types import Position

__all__ = ["SyntheticScores"]

_Floats: TypeAlias = NDArray[np.float64]

# (sigma, rho) of the weights: a sum over all queries has heavy, clustered hitters; single rows are nearer to even.
_CUMULATED, _WINDOWED = (1.5, 0.8), (1.0, 0.3)
_ROW_NOISE = 0.3


class SyntheticScores:
    """``vtoken.victims.Scores`` of requests of up to ``max_tokens`` tokens: a function of seed, trace_key and count."""

    def __init__(self, need: MassNeed, max_tokens: int, seed: int) -> None:
        self.need = need
        self.seed = seed
        self._weights: dict[int, _Floats] = {}
        counts = np.arange(max_tokens + 1, dtype=np.float64)
        paid = 1 / np.maximum(counts, 1)
        paid[0] = 0
        self._paid = np.fromiter(accumulate(paid, lambda total, new: total * need.decay + new), np.float64)

    def __call__(self, trace_key: int, positions: Sequence[Position]) -> tuple[Sequence[float], list[list[float]]]:
        places = np.asarray(positions, dtype=np.int64)  # [num_live] int64, ascending; the newest token is among them
        weights = self._weights_of(trace_key)[places]
        count = int(places[-1]) + 1
        if not self.need.window:
            fade = self.need.decay ** (count - places)
            return (weights * (self._paid[count] - fade * self._paid[places])).tolist(), []
        rows = np.stack(
            [
                self._row(trace_key, query, places, weights)
                for query in range(max(1, count - self.need.window + 1), count + 1)
            ]
        )
        return np.nansum(rows, axis=0).tolist(), rows.tolist() if self.need.rows else []

    def _row(self, trace_key: int, query: int, places: NDArray[np.int64], weights: _Floats) -> _Floats:
        """One query's mass row, float64 ``[num_live]``; NaN for tokens that came after it."""
        noise = np.random.default_rng((self.seed, trace_key, query)).standard_normal(len(places))
        row: _Floats = weights * np.exp(_ROW_NOISE * noise) / query
        row[places >= query] = np.nan
        return row

    def _weights_of(self, trace_key: int) -> _Floats:
        if trace_key not in self._weights:
            sigma, rho = _WINDOWED if self.need.window else _CUMULATED
            steps = np.random.default_rng((self.seed, trace_key)).standard_normal(len(self._paid))
            steps[1:] *= (1 - rho * rho) ** 0.5
            z = np.fromiter(accumulate(steps, lambda last, new: rho * last + new), np.float64)
            self._weights[trace_key] = np.exp(sigma * z)
        return self._weights[trace_key]
