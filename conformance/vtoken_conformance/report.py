"""What came of a run: a table for people, the failures in full, and a JSON record."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Table

from vtoken.report import environment
from vtoken_conformance.run import Failure, Row

__all__ = ["SCHEMA", "make_record", "print_failures", "print_summary"]

SCHEMA = "vtoken/conformance/1"
MAX_FAILURES_SHOWN = 20


def make_record(rows: Sequence[Row], failures: Sequence[Failure]) -> dict[str, Any]:
    """The JSON record of a run: schema, environment, rows, summary; and failures, in full, if there are any."""
    statuses = Counter(row.status for row in rows)
    record = {
        "schema": SCHEMA,
        "environment": environment(),
        "rows": [asdict(row) for row in rows],
        "summary": {
            "cases": len({row.case for row in rows}),
            "passed": statuses["passed"],
            "failed": statuses["failed"] + statuses["error"],
            "executors": list(dict.fromkeys(row.executor for row in rows)),
        },
    }
    return record | ({"failures": [asdict(failure) for failure in failures]} if failures else {})


def print_summary(rows: Sequence[Row], console: Console) -> None:
    """One line a chapter, one column an executor: passed of all; a dash where the chapter does not run on it."""
    executors = list(dict.fromkeys(row.executor for row in rows))
    table = Table()
    table.add_column("cases passed")
    for name in executors:
        table.add_column(name, justify="right")
    for chapter in dict.fromkeys(row.case.split("/")[0] for row in rows):
        in_chapter = [row for row in rows if row.case.split("/")[0] == chapter]
        table.add_row(chapter, *(_passed(in_chapter, name) for name in executors))
    table.add_section()
    table.add_row("all", *(_passed(rows, name) for name in executors))
    console.print(table)


def print_failures(failures: Sequence[Failure], console: Console) -> None:
    """Each failure in full: case, rule, step, expected, got, and the command that reruns it."""
    for failure in failures[:MAX_FAILURES_SHOWN]:
        lines = [
            f"FAILED {failure.case} on {failure.executor}",
            f"  rule      {failure.rule} of SPEC.md",
            f"  step      {failure.step}: {failure.op}",
            f"  what      {failure.what}",
            f"  expected  {failure.expected}",
            f"  got       {failure.got}",
            f"  rerun     {failure.rerun}",
        ]
        console.print("\n".join(lines), markup=False, highlight=False, soft_wrap=True)
        if failure.traceback:
            console.print(failure.traceback, markup=False, highlight=False, soft_wrap=True)
    if len(failures) > MAX_FAILURES_SHOWN:
        console.print(f"... and {len(failures) - MAX_FAILURES_SHOWN} more failures: --json FILE lists them all")


def _passed(rows: Sequence[Row], executor: str) -> str:
    mine = [row for row in rows if row.executor == executor]
    if not mine:
        return "-"
    passed = sum(row.status == "passed" for row in mine)
    return f"{passed} of {len(mine)}" if passed == len(mine) else f"[bold red]{passed} of {len(mine)}[/]"
