"""The demo on a terminal: the table, the verdict, and a few lines of what the model wrote."""

from collections.abc import Mapping, Sequence
from typing import Any

from rich.box import SIMPLE
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from vtoken_bench.pressure_report import print_pressure

__all__ = ["print_replays", "print_serving", "print_text", "print_verdict", "results_table"]

_SHOWN_LINES = 8
_WIDE = 96  # columns
_FIGURES = {
    "held_blocks_end": "held\nblocks",
    "held_blocks_peak": "\npeak",
    "ideal_blocks_end": "\nideal",
    "num_moved_tokens": "tokens\ncopied",
    "num_recycled_tokens": "tokens\nrecycled",
    "utilization_end": "utili-\nzation",
}
_FITTING = {
    _WIDE: tuple(_FIGURES),
    76: ("held_blocks_end", "ideal_blocks_end", "num_moved_tokens", "num_recycled_tokens"),
    0: ("held_blocks_end", "num_moved_tokens"),
}
"""Figures from so many columns on, the widest first. The report has all of them."""


def results_table(record: Mapping[str, Any], executors: Sequence[str], width: int) -> Table:
    """One row a policy and variant; a missing executor has a dash. A narrow ``width`` shows fewer figures."""
    figures = next(names for least, names in _FITTING.items() if width >= least)
    mark_heading = "same bytes?" if width >= _WIDE else "same?"
    table = Table(box=SIMPLE, pad_edge=False, padding=(0, int(width >= _WIDE)), collapse_padding=True)
    for key in ("policy", "variant"):
        longest = max(len(row[key] or "-") for row in record["rows"])
        table.add_column(f"\n{key}", no_wrap=True, min_width=max(longest, len(key)))
    for figure in figures:
        table.add_column(_FIGURES[figure], justify="right", overflow="fold")
    for name in executors:
        table.add_column(f"{mark_heading if name == executors[0] else ''}\n{name}", no_wrap=True)
    previous = None
    for row in record["rows"]:
        if previous is not None and row["policy"] != previous["policy"]:
            table.add_section()
        previous = row
        cells = [f"{row[figure]:.0%}" if figure == "utilization_end" else f"{row[figure]:,}" for figure in figures]
        marks = [_mark(row["executors"].get(name)) for name in executors]
        table.add_row(row["policy"] or "-", row["variant"], *cells, *marks)
    return table


def print_verdict(console: Console, record: Mapping[str, Any]) -> None:
    """One line if all is well, else the differences; then who took no part."""
    summary = record["summary"]
    if summary["same_bytes"]:
        console.print(
            f"[bold green]Same bytes:[/] {summary['num_replays']} replays agree with the record in all "
            f"{summary['num_checks']:,} fingerprints and, at the end, byte for byte.",
            highlight=False,
        )
    for line in summary["differences"]:
        console.print(f"[bold red]Difference:[/] {escape(line)}", highlight=False, soft_wrap=True)
    for name, reason in record["missing_executors"].items():
        console.print(f"[yellow]{name} is missing:[/] {escape(reason)}", highlight=False, soft_wrap=True)


def print_serving(console: Console, record: Mapping[str, Any]) -> None:
    """What vToken gives inside vLLM: its table, and what the table says."""
    print_pressure(console, record, "[bold]Inside vLLM:[/] ")
    console.print()


def print_text(console: Console, record: Mapping[str, Any]) -> None:
    """The end of the prompt, dimmed, and how the model went on."""
    run = record["run"]
    lines = run["continuation"].splitlines()
    shown = "\n".join(lines[:_SHOWN_LINES]) + ("\n…" if len(lines) > _SHOWN_LINES else "")
    console.print(f"[bold]{escape(record['model']['name'])} goes on with {escape(run['prompt'])}:[/]", highlight=False)
    console.print(Text.assemble((f"… {run['prompt_tail']}", "dim"), shown), soft_wrap=True)


def print_replays(console: Console, record: Mapping[str, Any]) -> None:
    """What the table below is about."""
    run, settings = record["run"], record["settings"]
    console.print(
        f"\n[bold]Its KV replayed:[/] {run['prompt_tokens']:,} + {run['decoded_tokens']:,} tokens, held in blocks of "
        f"{settings['block_size']}, and compared with the record",
        highlight=False,
    )


def _mark(done: Mapping[str, Any] | None) -> str:
    if done is None:
        return "[dim]-[/]"
    return "[green]same[/]" if done["same_bytes"] else "[bold red]differs[/]"
