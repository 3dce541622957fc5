"""Rows of a benchmark suite: as a table, and as the JSON record with its environment."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.box import SIMPLE
from rich.table import Table

from vtoken.native.loader import compiler
from vtoken.report import environment
from vtoken_bench.timing import Spread

__all__ = ["Row", "suite_record", "suite_table"]


@dataclass(frozen=True, slots=True)
class Row:
    """One figure: its unit, its bound if it has one, and the parameters that it was taken at."""

    name: str
    unit: str
    figure: Spread
    bound: float | None = None
    params: Mapping[str, int | float | str] = field(default_factory=dict)

    @property
    def within(self) -> bool:
        """The median keeps the bound; a figure without one does."""
        return self.bound is None or self.figure.median <= self.bound

    @property
    def label(self) -> str:
        """Name and parameters, such as ``evict_us[batch=256]``."""
        return f"{self.name}[{', '.join(f'{key}={value}' for key, value in self.params.items())}]"

    def as_record(self) -> dict[str, Any]:
        """The row of the JSON record."""
        return {
            "name": self.name,
            "unit": self.unit,
            "value": self.figure.median,
            "spread": [self.figure.low, self.figure.high],
            "bound": self.bound,
            "within": self.within,
            "params": dict(self.params),
        }


def suite_table(title: str, rows: Sequence[Row]) -> Table:
    """Medians with their ranges; a missed bound is red. Units stand in the names."""
    table = Table(title=title, title_justify="left", box=SIMPLE, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("what", overflow="fold")
    table.add_column("at", no_wrap=True)
    table.add_column("median", justify="right", no_wrap=True)
    table.add_column("range", justify="right", overflow="fold")
    table.add_column("bound", justify="right", no_wrap=True)
    for row in rows:
        low, high = row.figure.low, row.figure.high
        table.add_row(
            row.name,
            ", ".join(
                f"{key} {value:,}" if isinstance(value, int) else str(value) for key, value in row.params.items()
            ),
            f"{row.figure.median:.3g}",
            f"{low:.3g} - {high:.3g}",
            "-" if row.bound is None else f"{row.bound:g}",
            style=None if row.within else "red",
        )
    return table


def suite_record(schema: str, rows: Sequence[Row], summary: Mapping[str, Any]) -> dict[str, Any]:
    """The JSON record of a suite. ``summary`` is added to whether, and where, bounds were kept.

    The environment names the C++ compiler too, None where there is none: host code is then not compiled.
    """
    missed = [row.label for row in rows if not row.within]
    return {
        "schema": schema,
        "environment": {**environment(), "compiler": compiler()},
        "rows": [row.as_record() for row in rows],
        "summary": {"within_bounds": not missed, "missed": missed, **summary},
    }
