"""What a comparison of two executors is: pairs of measurements in turn, their ratio, and what bounds them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from time import perf_counter_ns, process_time_ns
from typing import Any, NamedTuple

from vtoken_bench.record import Row
from vtoken_bench.timing import Spread

__all__ = ["REST", "Clock", "Comparison", "Elapsed", "GateError", "Samples", "Shares", "bytes_row", "device_clock"]

REST = "rest"
"""The part of a time that no measured part explains."""


class Elapsed(NamedTuple):
    """Microseconds of one call: those that the comparison is about, and how long one waited."""

    us: float
    wall_us: float


Clock = Callable[[Callable[[], object]], Elapsed]


class Shares(NamedTuple):
    """Of JAX's and of PyTorch's time or figure."""

    jax: float
    torch: float


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
    """Times of one operation, round by round.

    Attributes:
        jax, torch: of both.
        others: of what is measured beside them.
        parts: what a time is made of, as each side's own times, or the same for both; parts do not overlap.
        floors: what the work cannot do without, whatever part it falls into.
    """

    jax: list[Elapsed] = field(default_factory=list)
    torch: list[Elapsed] = field(default_factory=list)
    others: dict[str, list[Elapsed]] = field(default_factory=dict)
    parts: dict[str, tuple[list[Elapsed], list[Elapsed]]] = field(default_factory=dict)
    floors: dict[str, list[Elapsed]] = field(default_factory=dict)

    def drop_first(self) -> None:
        """Forgets the round that only warms up."""
        every = [self.jax, self.torch, *self.others.values(), *self.floors.values()]
        every += [times for pair in self.parts.values() for times in pair]
        for times in {id(times): times for times in every}.values():  # a part may be one list for both sides
            del times[0]

    def row(
        self, name: str, params: Mapping[str, Any], parts: Mapping[str, Shares] | None = None, **about: Any
    ) -> "Comparison":
        """Ratios of each round. ``parts`` are shares that were measured apart from these rounds."""
        both = {"jax": self.jax, "torch": self.torch}
        return Comparison(
            name,
            "jax/torch",
            _ratio(self.jax, self.torch),
            params=params,
            jax=_spread(self.jax),
            torch=_spread(self.torch),
            rounds=len(self.jax),
            wall={key: Spread.of([each.wall_us for each in times]) for key, times in (both | self.others).items()},
            others={key: _spread(times) for key, times in self.others.items()},
            ratios={
                f"{key}/{side}": _ratio(times, ours)
                for key, times in self.others.items()
                for side, ours in both.items()
            },
            shares=_with_rest({key: self._shares(*pair) for key, pair in self.parts.items()} | dict(parts or {})),
            floors={key: self._shares(times, times) for key, times in self.floors.items()},
            **about,
        )

    def rates(self, name: str, count: int, params: Mapping[str, Any]) -> "Comparison":
        """``count`` units a call as units per second of wall time; the ratio is above 1 where JAX is faster."""
        every = {"jax": self.jax, "torch": self.torch, **self.others}
        rates = {key: [count * 1e6 / each.wall_us for each in times] for key, times in every.items()}
        spreads = {key: Spread.of(each) for key, each in rates.items()}
        ratio = [one / other for one, other in zip(rates["jax"], rates["torch"], strict=True)]
        return Comparison(
            name,
            "jax/torch",
            Spread.of(ratio),
            params=params,
            jax=spreads.pop("jax"),
            torch=spreads.pop("torch"),
            others=spreads,
            rounds=len(self.jax),
        )

    def _shares(self, of_jax: Sequence[Elapsed], of_torch: Sequence[Elapsed]) -> Shares:
        return Shares(_ratio(of_jax, self.jax).median, _ratio(of_torch, self.torch).median)


def _with_rest(parts: Mapping[str, Shares]) -> dict[str, Shares]:
    """Parts that noise makes larger than the whole leave no rest."""
    rest = (max(0.0, 1 - sum(side)) for side in zip(*parts.values(), strict=True))
    return {**parts, REST: Shares(*rest)} if parts else {}


def _spread(times: Sequence[Elapsed]) -> Spread:
    return Spread.of([each.us for each in times])


def _ratio(ones: Sequence[Elapsed], others: Sequence[Elapsed]) -> Spread:
    """Round by round."""
    return Spread.of([one.us / other.us for one, other in zip(ones, others, strict=True)])


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison(Row):
    """A row whose figure is the ratio jax / torch.

    Attributes:
        jax, torch: microseconds, or bytes, or a rate where the name says so.
        rounds: that were timed.
        wall: microseconds that one waited, of both and of the others; none but for times.
        others: what was measured beside them, in the same unit.
        ratios: of each other's time to JAX's and to PyTorch's, above 1 where the executor takes less.
        shares: of what a time is made, as a share of JAX's and of PyTorch's; with the rest they come to 1.
        floors: what the work cannot do without (a memcpy of the bytes that it must touch), as such shares.
        gate: figures of the check that came before.
        notes: what is left out of this row and why.
    """

    jax: Spread
    torch: Spread
    rounds: int = 1
    wall: Mapping[str, Spread] = field(default_factory=dict)
    others: Mapping[str, Spread] = field(default_factory=dict)
    ratios: Mapping[str, Spread] = field(default_factory=dict)
    shares: Mapping[str, Shares] = field(default_factory=dict)
    floors: Mapping[str, Shares] = field(default_factory=dict)
    gate: Mapping[str, Any] = field(default_factory=dict)
    notes: Sequence[str] = ()

    @property
    def bound_by(self) -> dict[str, str]:
        """The largest part of each side's time."""
        if not self.shares:
            return {}
        return {side: max(self.shares, key=lambda key: getattr(self.shares[key], side)) for side in Shares._fields}

    def as_record(self) -> dict[str, Any]:
        """The row of the JSON record."""
        return {
            **Row.as_record(self),
            **_records({"jax": self.jax, "torch": self.torch, **self.others}),
            "rounds": self.rounds,
            "wall_us": _records(self.wall),
            "ratios": _records(self.ratios),
            "bound_by": self.bound_by,
            "shares": {key: each._asdict() for key, each in self.shares.items()},
            "floors": {key: each._asdict() for key, each in self.floors.items()},
            "gate": dict(self.gate),
            "notes": list(self.notes),
        }


def bytes_row(
    name: str, params: Mapping[str, Any], jax: int, torch: int, others: Mapping[str, int] | None = None
) -> Comparison:
    """Memory, measured once."""
    beside = {key: Spread.of([count]) for key, count in (others or {}).items()}
    return Comparison(
        name,
        "jax/torch",
        Spread.of([jax / torch]),
        params=params,
        jax=Spread.of([jax]),
        torch=Spread.of([torch]),
        others=beside,
    )


def _records(figures: Mapping[str, Spread]) -> dict[str, Any]:
    return {key: {"value": each.median, "spread": [each.low, each.high]} for key, each in figures.items()}
