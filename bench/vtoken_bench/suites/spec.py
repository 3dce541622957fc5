"""``vtoken bench spec``: the spec's costs in pure Python, measured against their bounds."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from vtoken.cli import Command
from vtoken.errors import SpecError
from vtoken.report import check_output, write_json

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vtoken_bench.record import Row

__all__ = ["command"]

SCHEMA = "vtoken/bench-spec/1"

_GROWTH_LIMIT = 3.0  # from 1K to 128K tokens; a check that walks a request would be 128 times as dear


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--requests", type=int, default=48, help="requests in the pool (%(default)s)")
    parser.add_argument("--repeats", type=int, default=30, help="rounds of measurements (%(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the record to FILE")


def _run(arguments: argparse.Namespace) -> int:
    from rich.console import Console

    from vtoken_bench.record import suite_record, suite_table

    for key in ("requests", "repeats"):
        if getattr(arguments, key) < 1:
            raise SpecError(f"--{key} {getattr(arguments, key)}: give at least 1")
    check_output(arguments.json)
    rows = _measured(arguments.requests, arguments.repeats)
    growth = _check_growth(rows)
    grows = growth > _GROWTH_LIMIT
    console = Console()
    console.print(
        suite_table(f"processor time of the spec, {arguments.requests} requests, half of their tokens dead", rows)
    )
    verdict = f"[red]it grows with length (limit {_GROWTH_LIMIT:g})[/red]" if grows else "it does not grow with length"
    console.print(f"longest over shortest request, a check costs {growth:.2f} times as much: {verdict}", soft_wrap=True)
    if arguments.json:
        summary = {"check_growth": growth, "check_growth_limit": _GROWTH_LIMIT, "check_grows": grows}
        write_json(arguments.json, suite_record(SCHEMA, rows, summary))
    return int(grows)


def _measured(num_requests: int, repeats: int) -> "list[Row]":
    from vtoken_bench.record import Row
    from vtoken_bench.spec_costs import MEMORY_BOUND_BYTES, bytes_per_token, costs
    from vtoken_bench.timing import Spread, interleaved
    from vtoken_conformance.progress import progress_bar

    with progress_bar() as progress:
        task = progress.add_task("builds requests", total=repeats + 1)
        num_bytes = bytes_per_token(num_requests)
        todo = costs(num_requests)
        progress.update(task, description="measures")
        spreads = interleaved([cost.measure for cost in todo], repeats, lambda: progress.advance(task))
    rows = [
        Row(cost.name, "us", spread, cost.bound_us, cost.params) for cost, spread in zip(todo, spreads, strict=True)
    ]
    return [*rows, Row("bytes_per_token", "bytes", Spread.of([num_bytes]), MEMORY_BOUND_BYTES)]


def _check_growth(rows: "Sequence[Row]") -> float:
    """The worst mode's cost of a check in its longest requests over that in its shortest."""
    checks = [row for row in rows if row.name == "check_us_per_request"]
    growths = []
    for mode in {row.params["mode"] for row in checks}:
        by_length = sorted((row.params["tokens"], row.figure.median) for row in checks if row.params["mode"] == mode)
        growths.append(by_length[-1][1] / by_length[0][1])
    return max(growths)


command = Command(
    help="costs of token tables, planners and the manager's check, beside their bounds",
    add_arguments=_add_arguments,
    run=_run,
    epilog="Figures are reported, not judged, but for one: exit code 1 says that the check grows with length.",
)
