"""What a comparison of two executors is: pairs of measurements in turn, their ratio, and what bounds them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from time import perf_counter_ns, process_time_ns
from typing import Any

from rich.box import SIMPLE
from rich.table import Table

from vtoken_bench.record import Row
from vtoken_bench.timing import Spread

__all__ = ["Clock", "Comparison", "GateError", "Samples", "comparison_table", "device_clock"]

Clock = Callable[[Callable[[], object]], float]
"""Microseconds of one call."""


class GateError(Exception):
    """The executors do not give the same, so that their times say nothing; the message says where."""


def device_clock(device: str) -> Clock:
    """Processor time of the whole process on the CPU, all threads together; wall time on a GPU.

    XLA computes on threads of its own, so the caller's alone would miss them. Work must be finished inside the call.
    """
    now = process_time_ns if device == "cpu" else perf_counter_ns

    def elapsed(work: Callable[[], object]) -> float:
        start = now()
        work()
        return max((now() - start) / 1000, 0.001)  # a clock of coarse ticks may give 0

    return elapsed


@dataclass(slots=True)
class Samples:
    """Microseconds of one operation, round by round: of both, of others beside them, and of its physical bounds."""

    jax: list[float] = field(default_factory=list)
    torch: list[float] = field(default_factory=list)
    others: dict[str, list[float]] = field(default_factory=dict)
    bounds: dict[str, list[float]] = field(default_factory=dict)

    def drop_first(self) -> None:
        """Forgets the round that only warms up."""
        for times in (self.jax, self.torch, *self.others.values(), *self.bounds.values()):
            del times[0]

    def row(self, name: str, params: Mapping[str, int | float | str]) -> "Comparison":
        """Ratios of each round; a bound's time as a share of each executor's."""
        return Comparison(
            name,
            "jax/torch",
            Spread.of([ours / theirs for ours, theirs in zip(self.jax, self.torch, strict=True)]),
            params=params,
            jax=Spread.of(self.jax),
            torch=Spread.of(self.torch),
            others={key: Spread.of(values) for key, values in self.others.items()},
            bound_shares={key: self._shares(values) for key, values in self.bounds.items()},
        )

    def _shares(self, bound: Sequence[float]) -> tuple[float, float]:
        each = (
            Spread.of([b / t for b, t in zip(bound, times, strict=True)]).median for times in (self.jax, self.torch)
        )
        jax, torch = each
        return jax, torch


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison(Row):
    """A row whose figure is the ratio jax / torch, below 1 where JAX takes less.

    Attributes:
        jax, torch: microseconds, or bytes where the name says so.
        others: microseconds of what was measured beside them.
        bound_shares: what bounds the operation (a memcpy of the bytes that it must touch, the model's matrix
            products alone), measured in the same rounds: as a share of JAX's and of PyTorch's time.
    """

    jax: Spread
    torch: Spread
    others: Mapping[str, Spread] = field(default_factory=dict)
    bound_shares: Mapping[str, tuple[float, float]] = field(default_factory=dict)

    def as_record(self) -> dict[str, Any]:
        """The row of the JSON record."""
        times = {"jax": self.jax, "torch": self.torch, **self.others}
        return {
            **Row.as_record(self),
            **{key: {"value": each.median, "spread": [each.low, each.high]} for key, each in times.items()},
            "bound_by": {key: {"jax": jax, "torch": torch} for key, (jax, torch) in self.bound_shares.items()},
        }


def comparison_table(title: str, rows: Sequence[Comparison]) -> Table:
    """Medians of both, the ratio with its range, and the bounds as shares of JAX's / of PyTorch's time."""
    table = Table(title=title, title_justify="left", box=SIMPLE, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("what", no_wrap=True)
    table.add_column("at", overflow="fold")
    for name in ("jax", "torch", "ratio"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("range", justify="right", overflow="fold")
    table.add_column("bound by", overflow="fold")
    for row in rows:
        shares = (f"{key} {jax:.0%} / {torch:.0%}" for key, (jax, torch) in row.bound_shares.items())
        beside = (f"{key} {each.median:,.0f}" for key, each in row.others.items())
        table.add_row(
            row.name,
            ", ".join(str(value) for value in row.params.values()),
            *(f"{each.median:,.0f}" for each in (row.jax, row.torch)),
            f"{row.figure.median:.2f}",
            f"{row.figure.low:.2f} - {row.figure.high:.2f}",
            "; ".join([*shares, *beside]) or "-",
        )
    return table
