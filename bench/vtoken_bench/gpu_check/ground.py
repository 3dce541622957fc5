"""What a step stands on: a device, a list of checks, a list of figures. A rehearsal has no figures."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vtoken_bench.record import Row
from vtoken_bench.timing import Spread, interleaved

__all__ = ["TOLERANCES", "Check", "Ground", "LeftOut", "worst"]

TOLERANCES = {"float32": 1e-5, "bfloat16": 2**-7, "float16": 2**-10}
"""Largest difference over largest value, by the KV dtype (DESIGN §6)."""


class LeftOut(Exception):
    """A step cannot run here, and nothing is wrong; the message says why."""


@dataclass(frozen=True, slots=True)
class Check:
    """One statement, whether it holds, and by how much."""

    what: str
    good: bool
    detail: str = ""


@dataclass(slots=True)
class Ground:
    """Of one step.

    Attributes:
        is_dry: on the CPU, with tiny shapes, and nothing is measured.
        checks, figures: so far.
        notes: what else the reader must know: what was left out or not rehearsed, and why.
    """

    is_dry: bool
    checks: list[Check] = field(default_factory=list)
    figures: list[Row] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def device(self) -> str:
        """As PyTorch names it."""
        return "cpu" if self.is_dry else "cuda"

    def check(self, what: str, good: bool, detail: str = "") -> bool:
        """Notes whether ``what`` holds, and says so."""
        self.checks.append(Check(what, bool(good), detail))
        return bool(good)

    def close(self, what: str, got: NDArray[Any], expected: NDArray[Any], dtype: str) -> bool:
        """Checks ``got`` against float64 within the dtype's tolerance."""
        error = worst(got, expected)
        return self.check(what, error <= TOLERANCES[dtype], f"{error:.1e} of {TOLERANCES[dtype]:.1e}")

    def figure(self, name: str, unit: str, spread: Spread, **params: int | float | str) -> None:
        """Keeps what was measured; refuses in a rehearsal."""
        if self.is_dry:
            raise AssertionError(f"{name}: a rehearsal measures nothing")
        self.figures.append(Row(name, unit, spread, params=params))

    def time(
        self,
        works: Mapping[str, Callable[[], object]],
        clock: Callable[[Callable[[], object]], float],
        *,
        num_bytes: int | None = None,
        repeats: int = 10,
        **params: int | float | str,
    ) -> dict[str, Spread]:
        """Times works in turn, in microseconds by ``clock``; in a rehearsal runs each once and gives nothing.

        ``num_bytes`` that each of them has to move gives a rate as well.
        """
        if self.is_dry:
            for work in works.values():
                work()
            return {}
        spreads = interleaved([lambda work=work: clock(work) for work in works.values()], repeats)  # type: ignore[misc]
        taken = dict(zip(works, spreads, strict=True))
        for name, us in taken.items():
            self.figure(name, "us", us, **params)
            if num_bytes is not None:
                rate = Spread(*(num_bytes / value / 1e3 for value in (us.median, us.high, us.low)))
                self.figure(name, "GB/s", rate, **params)
        return taken


def worst(got: NDArray[Any], expected: NDArray[Any]) -> float:
    """The largest difference over the largest value. NaN is infinitely wrong, -inf equals -inf alone."""
    got, expected = np.asarray(got, np.float64), np.asarray(expected, np.float64)
    finite = np.isfinite(expected)
    if got.shape != expected.shape or not np.array_equal(got[~finite], expected[~finite]):
        return float("inf")
    if not np.isfinite(got[finite]).all():
        return float("inf")
    scale = max(float(np.abs(expected[finite]).max(initial=0.0)), 1e-6)
    return float(np.abs(got[finite] - expected[finite]).max(initial=0.0)) / scale
