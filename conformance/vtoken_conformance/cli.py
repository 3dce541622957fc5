"""``vtoken conformance``: executors against the brute-force model. Heavy imports wait until the command runs."""

import argparse
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vtoken.cli import Command
from vtoken.errors import SpecError
from vtoken.report import check_output, write_json
from vtoken_conformance.selection import VLLM, load_executors

if TYPE_CHECKING:
    from vtoken_conformance.run import Failure, Job, Row
    from vtoken_conformance.vllm_job import VllmJob

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
  vtoken conformance --executor vllm                                a real vLLM; its runs replayed on the executors
exit codes: 0 all passed, 1 a case failed, 2 bad usage, as an executor that cannot be made or lacks a method"""


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--executor",
        action="append",
        metavar="NAME",
        help="an installed executor, or MODULE:CLASS, in the current directory too, or vllm; may be repeated "
        "(default: all but vllm)",
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
        help="replay a victim trace in the variants naive, lazy, eager and fenced; without --case nothing else runs",
    )
    parser.add_argument(
        "--json",
        type=Path,
        metavar="FILE",
        help="also write schema, environment, rows and summary to FILE; and failures, if any",
    )


def _run(arguments: argparse.Namespace) -> int:
    if arguments.seeds < 0:
        raise SpecError(f"--seeds {arguments.seeds}: give 0 or more")
    check_output(arguments.json)
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # of tiny arrays, threads cost more than they give
    vllm_jobs, patterns = _select_vllm_jobs(arguments)
    names = None if arguments.executor is None else [name for name in arguments.executor if name != VLLM]
    is_vllm_alone = names == [] and not patterns and not arguments.trace
    jobs = [] if is_vllm_alone else _select_jobs(arguments, patterns)
    executors = _load_executors(names or None)
    rows, failures = _run_with_progress(vllm_jobs, jobs, executors)
    return _report(rows, failures, arguments.json)


def _select_vllm_jobs(arguments: argparse.Namespace) -> "tuple[list[VllmJob], list[str]]":
    """Runs of vLLM, where it is asked for, and the patterns that name other cases."""
    from vtoken_conformance.vllm_engine import prepare
    from vtoken_conformance.vllm_job import check_installed, select_vllm_jobs

    if VLLM not in (arguments.executor or ()):
        return [], arguments.case
    check_installed()
    prepare()
    return select_vllm_jobs(arguments.case)


def _select_jobs(arguments: argparse.Namespace, patterns: list[str]) -> "list[Job]":
    from vtoken_conformance.case import load_cases
    from vtoken_conformance.replay import load_trace_jobs
    from vtoken_conformance.run import select_jobs

    if arguments.case and not patterns:
        return []  # all of them name runs of vLLM
    jobs: list[Job] = []
    for path in arguments.trace:
        trace_jobs = load_trace_jobs(path)
        jobs += trace_jobs
        for warning in trace_jobs[0].trace.warnings:
            print(f"vtoken conformance: {warning}", file=sys.stderr)
    if patterns or not arguments.trace:
        jobs += select_jobs(load_cases(), patterns, arguments.seeds)
    return jobs


def _load_executors(names: list[str] | None) -> dict[str, Callable[[], Any]]:
    executors, left_out = load_executors(names)
    for name, reason in left_out.items():
        print(f"vtoken conformance: without executor {name!r}: {reason}", file=sys.stderr)
    return executors


def _run_with_progress(
    vllm_jobs: "list[VllmJob]", jobs: "list[Job]", executors: dict[str, Callable[[], Any]]
) -> "tuple[list[Row], list[Failure]]":
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn

    from vtoken_conformance.progress import progress_bar

    rows, failures = [], []
    columns = (TextColumn("{task.description:<12}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with progress_bar(*columns) as progress:
        task = progress.add_task("", total=len(vllm_jobs) + (len(vllm_jobs) + len(jobs)) * len(executors))
        for row, failure in _run_all(vllm_jobs, jobs, executors):
            rows.append(row)
            failures += [failure] if failure else []
            progress.update(task, advance=1, description=row.executor)
    return rows, failures


def _run_all(
    vllm_jobs: "list[VllmJob]", jobs: "list[Job]", executors: dict[str, Callable[[], Any]]
) -> "Iterator[tuple[Row, Failure | None]]":
    """vLLM's runs first; those that hold are replayed with the other jobs."""
    from vtoken_conformance.run import run_all
    from vtoken_conformance.vllm_job import run_on_vllm

    sound: list[Job] = []
    for job in vllm_jobs:
        row, failure = run_on_vllm(job)
        sound += [] if failure else [job]
        yield row, failure
    yield from run_all([*sound, *jobs], executors)


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
