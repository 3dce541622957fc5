"""What a comparison of two executors is: pairs of measurements in turn, their ratio, and what bounds them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from time import perf_counter_ns, process_time_ns
from typing import Any, NamedTuple

from rich.box import SIMPLE
from rich.table import Table

from vtoken_bench.record import Row
from vtoken_bench.timing import Spread

__all__ = ["Clock", "Comparison", "Elapsed", "GateError", "Samples", "comparison_table", "device_clock"]


class Elapsed(NamedTuple):
    """Microseconds of one call: those that the comparison is about, and how long one waited."""

    us: float
    wall_us: float


Clock = Callable[[Callable[[], object]], Elapsed]


class GateError(Exception):
    """The executors do not give the same, so that their times say nothing; the message says where."""


def device_clock(device: str) -> Clock:
    """Processor time of the whole process on the CPU, all threads together; wall time on a GPU; wall time beside it.

    XLA computes on threads of its own, so the caller's alone would miss them. Work must be finished inside the call.
    """

    def elapsed(work: Callable[[], object]) -> Elapsed:
        wall, processor = perf_counter_ns(), process_time_ns()
        work()
        processor, wall = process_time_ns() - processor, perf_counter_ns() - wall
        us, wall_us = (max(ns / 1000, 0.001) for ns in (processor, wall))  # a clock of coarse ticks may give 0
        return Elapsed(us if device == "cpu" else wall_us, wall_us)

    return elapsed


@dataclass(slots=True)
class Samples:
    """Times of one operation, round by round: of both, of others beside them, and of its physical bounds."""

    jax: list[Elapsed] = field(default_factory=list)
    torch: list[Elapsed] = field(default_factory=list)
    others: dict[str, list[Elapsed]] = field(default_factory=dict)
    bounds: dict[str, list[Elapsed]] = field(default_factory=dict)

    def drop_first(self) -> None:
        """Forgets the round that only warms up."""
        for times in (self.jax, self.torch, *self.others.values(), *self.bounds.values()):
            del times[0]

    def row(self, name: str, params: Mapping[str, int | float | str]) -> "Comparison":
        """Ratios of each round; a bound's time as a share of each executor's."""
        both = {"jax": self.jax, "torch": self.torch}
        return Comparison(
            name,
            "jax/torch",
            _ratio(self.jax, self.torch),
            params=params,
            jax=_spread(self.jax),
            torch=_spread(self.torch),
            wall={key: Spread.of([each.wall_us for each in times]) for key, times in (both | self.others).items()},
            others={key: _spread(times) for key, times in self.others.items()},
            ratios={
                f"{key}/{side}": _ratio(times, ours)
                for key, times in self.others.items()
                for side, ours in both.items()
            },
            bound_shares={
                key: (_ratio(times, self.jax).median, _ratio(times, self.torch).median)
                for key, times in self.bounds.items()
            },
        )


def _spread(times: Sequence[Elapsed]) -> Spread:
    return Spread.of([each.us for each in times])


def _ratio(ones: Sequence[Elapsed], others: Sequence[Elapsed]) -> Spread:
    """Round by round."""
    return Spread.of([one.us / other.us for one, other in zip(ones, others, strict=True)])


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison(Row):
    """A row whose figure is the ratio jax / torch, below 1 where JAX takes less.

    Attributes:
        jax, torch: microseconds, or bytes where the name says so.
        wall: microseconds that one waited, of both and of the others; none for bytes.
        others: microseconds of what was measured beside them.
        ratios: of each other's time to JAX's and to PyTorch's, above 1 where the executor takes less.
        bound_shares: what bounds the operation (a memcpy of the bytes that it must touch, the model's matrix
            products alone), measured in the same rounds: as a share of JAX's and of PyTorch's time.
    """

    jax: Spread
    torch: Spread
    wall: Mapping[str, Spread] = field(default_factory=dict)
    others: Mapping[str, Spread] = field(default_factory=dict)
    ratios: Mapping[str, Spread] = field(default_factory=dict)
    bound_shares: Mapping[str, tuple[float, float]] = field(default_factory=dict)

    def as_record(self) -> dict[str, Any]:
        """The row of the JSON record."""
        return {
            **Row.as_record(self),
            **_records({"jax": self.jax, "torch": self.torch, **self.others}),
            "wall_us": _records(self.wall),
            "ratios": _records(self.ratios),
            "bound_by": {key: {"jax": jax, "torch": torch} for key, (jax, torch) in self.bound_shares.items()},
        }


def _records(figures: Mapping[str, Spread]) -> dict[str, Any]:
    return {key: {"value": each.median, "spread": [each.low, each.high]} for key, each in figures.items()}


def comparison_table(title: str, rows: Sequence[Comparison]) -> Table:
    """Medians of both, the ratio with its range, wall times, and the bounds as shares of JAX's / of PyTorch's time.

    What was measured beside them follows in lines of its own. 100 columns are enough.
    """
    table = Table(title=title, title_justify="left", box=SIMPLE, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("what", no_wrap=True)
    table.add_column("at", overflow="fold")
    for name in ("jax", "torch", "ratio", "range", "wall ms"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("bound by", overflow="fold")
    for row in rows:
        shares = (f"{key} {jax:.0%} / {torch:.0%}" for key, (jax, torch) in row.bound_shares.items())
        table.add_row(
            row.name,
            ", ".join(str(value) for value in row.params.values()),
            _number(row.jax),
            _number(row.torch),
            *_ratio_cells(row.figure),
            f"{_milliseconds(row.wall['jax'])} / {_milliseconds(row.wall['torch'])}" if row.wall else "-",
            "; ".join(shares) or "-",
        )
        for key, time in row.others.items():
            for side, wall, own in (("jax", _milliseconds(row.wall[key]), f"{key} {_number(time)}"), ("torch", "", "")):
                name = f"{key}/{side}"
                table.add_row(f"  {name}", "", "", "", *_ratio_cells(row.ratios[name]), wall, own)
    return table


def _number(figure: Spread) -> str:
    return f"{figure.median / 1e6:,.1f}M" if figure.median >= 1e7 else f"{figure.median:,.0f}"


def _milliseconds(figure: Spread) -> str:
    ms = figure.median / 1000
    return f"{ms:,.0f}" if ms >= 10 else f"{ms:.2g}"


def _ratio_cells(ratio: Spread) -> tuple[str, str]:
    return f"{ratio.median:.2f}", f"{ratio.low:.2f} - {ratio.high:.2f}"
