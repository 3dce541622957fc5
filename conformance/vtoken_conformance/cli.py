"""``vtoken conformance``: executors against the brute-force model. Heavy imports wait until the command runs."""

import argparse
import importlib
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vtoken.cli import Command
from vtoken.errors import SpecError
from vtoken.plugins import EXECUTORS, get_plugin, load_plugins
from vtoken.report import check_output, write_json

if TYPE_CHECKING:
    from vtoken_conformance.run import Failure, Job, Row

__all__ = ["command"]

DEFAULT_SEEDS = 50

_DESCRIPTION = """\
Drives executors through the same programs and compares what each shows in its own arrays with a brute-force model
after every step: live positions, KV bytes, fingerprints, blocks, attention output and mass."""

_EPILOG = """\
examples:
  vtoken conformance                                                every executor that is installed
  vtoken conformance --executor torch --executor jax --seeds 1000   two executors, a thousand random programs
  vtoken conformance --case 'recycle/*' --case random/17            one chapter, and one random program
  vtoken conformance --executor my_package.executor:MyExecutor      an executor of your own
exit codes: 0 all passed, 1 a case failed, 2 bad usage"""


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--executor",
        action="append",
        metavar="NAME",
        help="an installed executor, or MODULE:CLASS; may be repeated (default: all that load)",
    )
    parser.add_argument(
        "--seeds",
        type=int,
        default=DEFAULT_SEEDS,
        metavar="N",
        help=f"random programs random/0 to random/N-1 (default {DEFAULT_SEEDS})",
    )
    parser.add_argument(
        "--case",
        action="append",
        default=[],
        metavar="GLOB",
        help="run only cases with such names, for example 'plans/fill_*' or random/17; may be repeated",
    )
    parser.add_argument(
        "--trace",
        action="append",
        default=[],
        type=Path,
        metavar="FILE",
        help="replay a victim trace in the variants naive, lazy and eager; without --case nothing else runs",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the result to FILE")


def _run(arguments: argparse.Namespace) -> int:
    if arguments.seeds < 0:
        raise SpecError(f"--seeds {arguments.seeds}: give 0 or more")
    check_output(arguments.json)
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # of tiny arrays, threads cost more than they give
    jobs = _select_jobs(arguments)
    executors = _load_executors(arguments.executor)
    rows, failures = _run_with_progress(jobs, executors)
    return _report(rows, failures, arguments.json)


def _select_jobs(arguments: argparse.Namespace) -> "list[Job]":
    from vtoken_conformance.case import load_cases
    from vtoken_conformance.replay import load_trace_jobs
    from vtoken_conformance.run import select_jobs

    jobs: list[Job] = []
    for path in arguments.trace:
        trace_jobs = load_trace_jobs(path)
        jobs += trace_jobs
        for warning in trace_jobs[0].trace.warnings:
            print(f"vtoken conformance: {warning}", file=sys.stderr)
    if arguments.case or not arguments.trace:
        jobs += select_jobs(load_cases(), arguments.case, arguments.seeds)
    return jobs


def _load_executors(names: list[str] | None) -> dict[str, Callable[[], Any]]:
    if names is None:
        loaded, failed = load_plugins(EXECUTORS)
        for name, reason in failed.items():
            print(f"vtoken conformance: without executor {name!r}: {reason}", file=sys.stderr)
        if not loaded:
            raise SpecError("no executor loads: name one that does with --executor")
        return loaded
    return {name: _import_class(name) if ":" in name else get_plugin(EXECUTORS, name) for name in names}


def _import_class(path: str) -> Callable[[], Any]:
    module, _, name = path.partition(":")
    try:
        made = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise SpecError(f"executor {path!r}: {error}: give MODULE:CLASS as Python would import it") from error
    if not isinstance(made, type):
        raise SpecError(f"executor {path!r} is no class: give MODULE:CLASS")
    return made


def _run_with_progress(jobs: "list[Job]", executors: dict[str, Callable[[], Any]]) -> "tuple[list[Row], list[Failure]]":
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    from vtoken_conformance.run import run_all

    rows, failures = [], []
    columns = (TextColumn("{task.description:<12}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("", total=len(jobs) * len(executors))
        for row, failure in run_all(jobs, executors):
            rows.append(row)
            failures += [failure] if failure else []
            progress.update(task, advance=1, description=row.executor)
    return rows, failures


def _report(rows: "list[Row]", failures: "list[Failure]", json_path: Path | None) -> int:
    from rich.console import Console

    from vtoken_conformance.report import make_record, print_failures, print_summary

    console = Console()
    print_failures(failures, console)
    print_summary(rows, console)
    record = make_record(rows, failures)
    if json_path:
        write_json(json_path, record)
    summary = record["summary"]
    console.print(f"{summary['cases']} cases, {summary['passed']} passed, {summary['failed']} failed", highlight=False)
    return 1 if failures else 0


command = Command(
    help="executors against a brute-force model: cases, random programs, recorded traces",
    add_arguments=_add_arguments,
    run=_run,
    description=_DESCRIPTION,
    epilog=_EPILOG,
)
