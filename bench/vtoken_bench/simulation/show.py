"""A study as tables, as a picture, and as a JSON record."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from vtoken.config import VTokenConfig
from vtoken_bench.plot import line_plot
from vtoken_bench.simulation.engine import Run, Sample, Workload
from vtoken_bench.simulation.study import VARIANTS, Outcome

__all__ = ["SCHEMA", "picture", "print_curve", "print_summary", "record"]

SCHEMA = "vtoken/simulate/1"

_FIGURES = {
    "peak_blocks": "peak\nblocks",
    "final_blocks": "at the\nend",
    "ideal_blocks": "ideal",
    "copies": "copies",
    "worst_step_copies": "worst\nstep",
    "max_requests": "requests\nthat fit",
}
_NUM_POINTS = 10
_NUM_CURVE_POINTS = 256
_BAR_WIDTH = 40
_CURVE_FIGURES_WIDTH = 30  # of the three columns before the bar
_SPARKS, _ASCII_SPARKS = "▁▂▃▄▅▆▇█", "_.:-=+*#"
_BARS, _ASCII_BARS = ("█", "▒"), ("#", "+")
_SPARK_WIDTH = 9
_NARROW = 78  # columns


def print_summary(console: Console, outcomes: Mapping[str, Outcome], workload: Workload) -> None:
    """One row for each variant: a request alone, and the pool's last word. Narrow terminals go without sparklines."""
    is_narrow = console.width < _NARROW
    evicted = outcomes["vtoken"].alone.counters.num_evicted_tokens
    table = Table(
        title=f"one request alone ({evicted:,} of {workload.total:,} tokens evicted), and a pool of "
        f"{workload.pool_blocks:,} blocks",
        title_justify="left",
        box=SIMPLE,
        pad_edge=False,
        padding=(0, 0 if is_narrow else 1, 0, 0),
    )
    table.add_column("\nvariant", no_wrap=True, min_width=max(map(len, outcomes)))
    if not is_narrow:
        table.add_column("held over\ntime", no_wrap=True)
    for heading in (*_FIGURES.values(), "copies\neach"):
        table.add_column(heading, justify="right", overflow="fold")
    top = max(outcome.alone.peak_blocks for outcome in outcomes.values())
    for name, outcome in outcomes.items():
        row = _row(name, outcome)
        together = row["together"]
        copies = f"{together['copies_per_request']:,.0f}" if together else "-"
        sparks = [] if is_narrow else [_sparkline(console, outcome.alone, top)]
        table.add_row(name, *sparks, *(f"{row[figure]:,}" for figure in _FIGURES), copies)
    console.print(table)


def print_curve(console: Console, name: str, outcome: Outcome, native: Outcome) -> None:
    """Held blocks of one request alone at some ten points, beside the ideal; the bar's full width is native's peak."""
    table = Table(title=f"{name}: held blocks of one request alone", title_justify="left", box=SIMPLE, pad_edge=False)
    full, hollow = _ASCII_BARS if console.options.ascii_only else _BARS
    for heading in ("tokens", "held", "ideal"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column(f"{full} ideal  {hollow} beyond it  (width: native's {native.alone.peak_blocks:,})")
    bar_width = min(_BAR_WIDTH, max(1, console.width - _CURVE_FIGURES_WIDTH))
    scale = bar_width / native.alone.peak_blocks
    for sample in _thinned(outcome.alone.samples, _NUM_POINTS):
        ideal, held = round(sample.ideal_blocks * scale), round(sample.held_blocks * scale)
        bar = full * ideal + hollow * (held - ideal)
        table.add_row(f"{sample.computed_tokens:,}", f"{sample.held_blocks:,}", f"{sample.ideal_blocks:,}", bar)
    console.print(table)


def picture(outcomes: Mapping[str, Outcome], config: VTokenConfig, image_format: str) -> bytes:
    """Held blocks of one request alone over its computed tokens, all variants and the ideal."""
    series = _series(outcomes)
    tokens = series["computed_tokens"]
    return line_plot(
        {
            **{name: (tokens, held) for name, held in series["held_blocks"].items()},
            "ideal": (tokens, series["ideal_blocks"]),
        },
        title=f"one request, policy {config.policy}",
        x_label="computed tokens",
        y_label="held blocks",
        image_format=image_format,
        dashed=frozenset({"ideal"}),
    )


def record(outcomes: Mapping[str, Outcome], config: VTokenConfig, workload: Workload) -> dict[str, Any]:
    """The JSON record; its series are of one request alone."""
    return {
        "schema": SCHEMA,
        "workload": asdict(workload),
        "config": asdict(config),
        "rows": [_row(name, outcome) for name, outcome in outcomes.items()],
        "series": _series(outcomes),
        "summary": {"max_requests": {name: outcomes[name].max_requests for name in VARIANTS}},
    }


def _row(name: str, outcome: Outcome) -> dict[str, Any]:
    alone, counters = outcome.alone, outcome.alone.counters
    return {
        "variant": name,
        "peak_blocks": alone.peak_blocks,
        "final_blocks": alone.samples[-1].held_blocks,
        "ideal_blocks": alone.samples[-1].ideal_blocks,
        "copies": alone.copies,
        "worst_step_copies": alone.worst_step_copies,
        "recycled": counters.num_recycled_tokens,
        "evictions": counters.num_evicted_tokens,
        "plans": counters.num_plans,
        "max_requests": outcome.max_requests,
        "together": _together(outcome),
        "refusal": outcome.refusal,
    }


def _together(outcome: Outcome) -> dict[str, Any] | None:
    run, count = outcome.frontier, outcome.max_requests
    if run is None:
        return None
    return {
        "num_requests": count,
        "peak_blocks": run.peak_blocks,
        "copies_per_request": run.copies / count,
        "worst_step_copies": run.worst_step_copies,
        "evictions": run.counters.num_evicted_tokens,
        "plans": run.counters.num_plans,
    }


def _thinned(samples: Sequence[Sample], count: int) -> list[Sample]:
    """At most ``count`` samples, evenly spread over the passes, the first and the last one among them."""
    if len(samples) <= count:
        return list(samples)
    return [samples[index * (len(samples) - 1) // (count - 1)] for index in range(count)]


def _series(outcomes: Mapping[str, Outcome]) -> dict[str, Any]:
    samples = {name: _thinned(outcome.alone.samples, _NUM_CURVE_POINTS) for name, outcome in outcomes.items()}
    return {
        "computed_tokens": [sample.computed_tokens for sample in samples["vtoken"]],
        "ideal_blocks": [sample.ideal_blocks for sample in samples["vtoken"]],
        "held_blocks": {name: [sample.held_blocks for sample in curve] for name, curve in samples.items()},
    }


def _sparkline(console: Console, run: Run, top: int) -> str:
    sparks = _ASCII_SPARKS if console.options.ascii_only else _SPARKS
    heights = (sample.held_blocks / top for sample in _thinned(run.samples, _SPARK_WIDTH))
    return "".join(sparks[min(len(sparks) - 1, int(height * len(sparks)))] for height in heights)
