"""The comparison as a table for terminals: figures with their units, ratios, and what bounds each."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any, Final

from rich.console import Group, JustifyMethod, RenderableType
from rich.table import Table
from rich.text import Text

__all__ = ["bound", "comparison_table", "place", "quantity"]

_SIDES = ("jax", "torch")
_COLUMNS: Final[Sequence[tuple[str, int | None]]] = (
    ("what", 15), ("jax", 8), ("torch", 8), ("hf, rows", 8), ("jax/torch", 9), ("range", 11), ("bound by", None),
)  # fmt: skip
"""Heads and widths; the last takes what is left."""
_TEXTS: Final = ("what", "bound by")
_Record = Mapping[str, Any]


def comparison_table(title: str, rows: Sequence[_Record]) -> Group:
    """Of the rows of a JSON record: medians of both and of what was measured beside them, the ratio with its range, and
    the largest part of JAX's and of PyTorch's time; under a line for each shape. 80 columns are enough.
    """
    parts: list[RenderableType] = [Text(title, "italic"), Text(_heads(), "bold")]
    for at, group in groupby(rows, place):
        grid = Table.grid(padding=(0, 1, 0, 0))
        for name, width in _COLUMNS:
            justify: JustifyMethod = "left" if name in _TEXTS else "right"
            grid.add_column(width=width, justify=justify, overflow="fold", no_wrap=name not in _TEXTS)
        for row in group:
            for cells in _lines(row):
                grid.add_row(*cells)
        parts += [Text(f"\n{at}", "bold"), grid]
    return Group(*parts)


def _heads() -> str:
    cells = (name.ljust(width or 0) if name in _TEXTS else name.rjust(width or 0) for name, width in _COLUMNS)
    return " ".join(cells)


def place(row: _Record) -> str:
    """The parameters of a row, as ``batch 8, live 512, f32``."""
    params = row["params"]
    return ", ".join(str(value) if key == "dtype" else f"{key} {value:,}" for key, value in params.items())


def _lines(row: _Record) -> Iterator[tuple[str, ...]]:
    """The row, and one line more for each ratio to what was measured beside."""
    unit = _unit(row["name"])
    beside = next((key for key in row if key in ("hf", "rows")), None)
    yield (
        row["name"].removesuffix("_us").removesuffix("_bytes").replace("_per_s", "/s").replace("_", " "),
        *(quantity(row[side]["value"], unit) for side in _SIDES),
        quantity(row[beside]["value"], unit) if beside else "-",
        *_ratio(row),
        bound(row),
    )
    for key, ratio in row["ratios"].items():
        yield f"  {key}", "", "", "", *_ratio(ratio), ""


def _unit(name: str) -> str:
    return next((unit for unit in ("us", "bytes") if name.endswith(f"_{unit}")), "")


def quantity(value: float, unit: str) -> str:
    """Three digits that count, such as ``246 ms``, ``1.31 s``, ``188 MB``, of ``us``, ``bytes`` or plain numbers."""
    steps = {"us": ("us", "ms", "s"), "bytes": ("B", "kB", "MB", "GB"), "": ("",)}[unit]
    at = 0
    while value >= 999.5 and at + 1 < len(steps):
        value, at = value / 1000, at + 1
    digits = 0 if value >= 99.95 or (unit == "bytes" and not at) else 1 if value >= 9.995 else 2
    return f"{value:,.{digits}f} {steps[at]}".rstrip()


def _ratio(figure: _Record) -> tuple[str, str]:
    value, low, high = (quantity(each, "") for each in (figure["value"], *figure["spread"]))
    return value, "once" if figure.get("rounds") == 1 else f"{low}-{high}"


def bound(row: _Record) -> str:
    """The largest part of either's time, once if it is the same part."""
    bound = row["bound_by"]
    if not bound:
        return "-"
    share = {side: f"{row['shares'][bound[side]][side]:.0%}" for side in _SIDES}
    if bound["jax"] == bound["torch"]:
        return f"{bound['jax']} {share['jax']} / {share['torch']}"
    return f"{bound['jax']} {share['jax']} / {bound['torch']} {share['torch']}"
