"""The one table, and the record."""

import shutil
import subprocess
from collections.abc import Sequence
from typing import Any

from rich.box import SIMPLE
from rich.table import Table

from vtoken.report import environment
from vtoken_bench.gpu_check.worker import Outcome
from vtoken_bench.record import Row

__all__ = ["SCHEMA", "gpu_names", "make_record", "make_table"]

SCHEMA = "vtoken/gpu-check/1"

_STYLES = {"FAILED": "red", "OVERRAN": "red", "left out": "yellow"}


def gpu_names() -> list[str]:
    """Name, driver and memory of each NVIDIA GPU, as nvidia-smi says; empty where it does not run."""
    if shutil.which("nvidia-smi") is None:
        return []
    command = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
    found = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    return found.stdout.strip().splitlines() if found.returncode == 0 else []


def make_table(title: str, outcomes: Sequence[Outcome]) -> Table:
    """A line for each step, its figures and what is to be said of it beneath."""
    table = Table(title=title, title_justify="left", box=SIMPLE, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("step", overflow="fold")
    table.add_column("at", overflow="fold")
    table.add_column("result", justify="right", no_wrap=True)
    table.add_column("range", justify="right", no_wrap=True)
    for outcome in outcomes:
        checks = f"{outcome.num_checks} checks" if outcome.num_checks else ""
        seconds = "" if outcome.seconds is None else f"{outcome.seconds:g} s"
        style = _STYLES.get(outcome.status, "bold")
        table.add_row(f"{outcome.step.name}: {outcome.step.what}", checks, outcome.status, seconds, style=style)
        for finding in outcome.findings[:8]:
            table.add_row(f"  {finding}", style="red")
        for note in outcome.notes:
            table.add_row(f"  {note}", style="dim")
        for row in outcome.figures:
            table.add_row(*_figure(row))
    return table


def _figure(row: Row) -> tuple[str, str, str, str]:
    at = ", ".join(f"{key} {value:,}" if isinstance(value, int) else str(value) for key, value in row.params.items())
    spread = row.figure
    ends = "" if spread.low == spread.high else f"{spread.low:.3g} - {spread.high:.3g}"
    return f"  {row.name}", at, f"{spread.median:.4g} {row.unit}", ends


def make_record(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """Of steps that ran on a GPU."""
    return {
        "schema": SCHEMA,
        "environment": environment(),
        "gpus": gpu_names(),
        "rows": [_row(outcome) for outcome in outcomes],
        "summary": {
            "steps": len(outcomes),
            "checks": sum(outcome.num_checks for outcome in outcomes),
            "failed": [outcome.step.name for outcome in outcomes if outcome.is_bad],
            "left_out": [outcome.step.name for outcome in outcomes if outcome.status == "left out"],
        },
    }


def _row(outcome: Outcome) -> dict[str, Any]:
    return {
        "step": outcome.step.name,
        "status": outcome.status,
        "checks": outcome.num_checks,
        "seconds": outcome.seconds,
        "findings": list(outcome.findings),
        "notes": list(outcome.notes),
        "figures": [row.as_record() for row in outcome.figures],
    }
