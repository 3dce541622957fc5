"""The soak's record and table."""

from collections.abc import Mapping
from typing import Any

from rich.box import SIMPLE
from rich.table import Table

from vtoken.report import environment
from vtoken_bench.soak.run import Result, Soak

__all__ = ["make_record", "soak_lines", "soak_table"]

SCHEMA = "vtoken/bench-soak/1"
_COUNTS = ("done", "aborted", "rejected", "errors")
_HEADINGS = (
    *("\ndone", "\naborted", "re-\njected", "\nerrors", "leaked\nblocks", "preemp-\ntions"),
    *("time\ns", "memory\n+ MB", "exit\ncode"),
)


def make_record(soak: Soak, settings: Mapping[str, Any], vtoken: Result, stock: Result | None) -> dict[str, Any]:
    """The JSON record. ``rows``: one for each server; figures of stock vLLM are None where it did not run."""
    counts = {name: vtoken.tally.counts[name] for name in _COUNTS}
    return {
        "schema": SCHEMA,
        "environment": environment(),
        "params": {
            "requests": soak.num_requests,
            "clients": soak.num_clients,
            "block_size": soak.block_size,
            "blocks": soak.num_blocks,
            "seed": soak.seed,
            "arguments": soak.arguments()[1:],
            "vtoken": dict(settings),
        },
        "rows": [_row("vtoken", vtoken), *([_row("stock", stock)] if stock else [])],
        "summary": {
            **counts,
            "leaked_blocks": vtoken.leaked_blocks,
            "preemptions": vtoken.preemptions,
            "rss_growth_mb": vtoken.rss_growth_mb["total"],
            "rss_growth_stock_mb": stock.rss_growth_mb["total"] if stock else None,
            "exit_code": vtoken.end.exit_code,
            "left_processes": vtoken.end.num_left,
            "good": is_good(vtoken),
        },
    }


def is_good(result: Result) -> bool:
    """No error, no block kept, ended as told with no process left. Nothing else is judged."""
    return not (result.tally.counts["errors"] or result.leaked_blocks or result.end.exit_code or result.end.num_left)


def soak_lines(record: Mapping[str, Any]) -> list[str]:
    """The judgement, then what weakens it."""
    summary = record["summary"]
    bad = {
        "errors": summary["errors"],
        "leaked blocks": summary["leaked_blocks"],
        "exit code": summary["exit_code"],
        "processes left": summary["left_processes"],
    }
    faults = ", ".join(f"{name} {count}" for name, count in bad.items() if count)
    lines = [f"bad: {faults}" if faults else "good: no errors, no block leaked, a clean end"]
    if not any(row["preemptions"] for row in record["rows"]):
        lines.append(
            "warning: the pool was never short (0 preemptions), so this says little: give fewer --blocks, or more "
            "--clients"
        )
    if (stock := summary["rss_growth_stock_mb"]) is not None:
        more = summary["rss_growth_mb"] - stock
        lines.append(
            f"memory grew by {abs(more):.1f} MB {'more' if more > 0 else 'less'} than stock vLLM's: not judged"
        )
    return lines


def soak_table(record: Mapping[str, Any]) -> Table:
    """One line for each server."""
    table = Table(box=SIMPLE, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("\nserver", no_wrap=True)
    for heading in _HEADINGS:
        table.add_column(heading, justify="right", no_wrap=True)
    for row in record["rows"]:
        table.add_row(
            row["server"],
            *(f"{row[name]:,}" for name in _COUNTS),
            str(row["leaked_blocks"]),
            f"{row['preemptions']:,}",
            f"{row['seconds']:.0f}",
            f"{row['rss_growth_mb']['total']:+.1f}",
            str(row["exit_code"]),
        )
    return table


def _row(name: str, result: Result) -> dict[str, Any]:
    return {
        "server": name,
        **{count: result.tally.counts[count] for count in _COUNTS},
        "first_errors": result.tally.errors,
        "seconds": result.seconds,
        "leaked_blocks": result.leaked_blocks,
        "preemptions": result.preemptions,
        "rss_growth_mb": result.rss_growth_mb,
        "exit_code": result.end.exit_code,
        "left_processes": result.end.num_left,
        "samples": [
            {"seconds": sample.seconds, "requests": sample.num_sent, "rss_mb": dict(sample.rss_mb)}
            for sample in result.samples
        ],
    }
