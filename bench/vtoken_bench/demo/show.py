"""The demo on a terminal: the table, the verdict, and a few lines of what the model wrote."""

from collections.abc import Mapping, Sequence
from typing import Any

from rich.box import SIMPLE
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

__all__ = ["print_text", "print_verdict", "results_table"]

_SHOWN_LINES = 8
_FIGURES = {
    "held_blocks_end": "held\nblocks",
    "held_blocks_peak": "\npeak",
    "ideal_blocks_end": "\nideal",
    "num_moved_tokens": "tokens\ncopied",
    "num_recycled_tokens": "tokens\nrecycled",
}


def results_table(record: Mapping[str, Any], executors: Sequence[str]) -> Table:
    """One row a policy and variant; a missing executor has a dash."""
    table = Table(box=SIMPLE, pad_edge=False, collapse_padding=True)
    table.add_column("\npolicy", no_wrap=True)
    table.add_column("\nvariant", no_wrap=True)
    for heading in _FIGURES.values():
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("utili-\nzation", justify="right", no_wrap=True)
    for name in executors:
        table.add_column(f"same bytes?\n{name}" if name == executors[0] else f"\n{name}", no_wrap=True)
    previous = None
    for row in record["rows"]:
        if previous is not None and row["policy"] != previous["policy"]:
            table.add_section()
        previous = row
        figures = [f"{row[figure]:,}" for figure in _FIGURES]
        marks = [_mark(row["executors"].get(name)) for name in executors]
        table.add_row(row["policy"] or "-", row["variant"], *figures, f"{row['utilization_end']:.0%}", *marks)
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


def print_text(console: Console, record: Mapping[str, Any]) -> None:
    """The end of the prompt, dimmed, and how the model went on."""
    run = record["run"]
    lines = run["continuation"].splitlines()
    shown = "\n".join(lines[:_SHOWN_LINES]) + ("\n…" if len(lines) > _SHOWN_LINES else "")
    console.print(f"[bold]{escape(record['model']['name'])} goes on with {escape(run['prompt'])}:[/]", highlight=False)
    console.print(Text.assemble((f"… {run['prompt_tail']}", "dim"), shown), soft_wrap=True)


def _mark(done: Mapping[str, Any] | None) -> str:
    if done is None:
        return "[dim]-[/]"
    return "[green]same[/]" if done["same_bytes"] else "[bold red]differs[/]"
