"""Runs programs and traces on executors: which ones, one after the other, and what came of each."""

import difflib
import re
import shlex
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Literal, Protocol

from vtoken.errors import SpecError
from vtoken.executor import Executor
from vtoken_conformance.checked import CheckedExecutor
from vtoken_conformance.generate import CROWD_NAMES, NAME_PREFIX, generate, generate_crowd
from vtoken_conformance.mismatch import Mismatch
from vtoken_conformance.program import Program, ProgramRun

__all__ = ["Failure", "Job", "ProgramJob", "Row", "carry_out", "run_all", "run_job", "select_jobs"]

Status = Literal["passed", "failed", "error"]
ExecutorFactory = Callable[[], Executor]

_SUITE = Path(__file__).parent
_RANDOM_CASE = re.compile(rf"{re.escape(NAME_PREFIX)}(\d+)$")


class Job(Protocol):
    """Something to run under a name, step by step."""

    @property
    def name(self) -> str: ...

    @property
    def arguments(self) -> tuple[str, ...]:
        """What the command line needs to run this job alone."""
        ...

    def start(self, executor: Executor) -> "Run":
        """Prepares a run on this executor."""
        ...


class Run(Protocol):
    """One job on one executor. ``step_number`` counts from 1 and stands at the step that failed."""

    step_number: int

    @property
    def fingerprint_so_far(self) -> str:
        """16 hex digits over what the executor showed: where they are equal, KV was."""
        ...

    def run(self) -> None:
        """Raises Mismatch at the first difference."""
        ...

    def step_text(self) -> str: ...


@dataclass(frozen=True, slots=True)
class Failure:
    """The first difference of one job on one executor; ``traceback`` only where the executor itself raised."""

    case: str
    executor: str
    rule: str
    step: int
    op: str
    what: str
    expected: str
    got: str
    rerun: str
    traceback: str = ""


@dataclass(frozen=True, slots=True)
class Row:
    """One job on one executor. ``fingerprint`` is over all requests after all steps: where it is equal, KV was."""

    case: str
    executor: str
    status: Status
    steps: int
    fingerprint: str


@dataclass(frozen=True, slots=True)
class ProgramJob:
    """A case or a random program."""

    program: Program

    @property
    def name(self) -> str:
        return self.program.name

    @property
    def arguments(self) -> tuple[str, ...]:
        return ("--case", self.program.name)

    def start(self, executor: Executor) -> ProgramRun:
        return ProgramRun(self.program, CheckedExecutor(executor, check_every=self.program.check_every))


def select_jobs(programs: Sequence[Program], patterns: Sequence[str], num_seeds: int) -> list[ProgramJob]:
    """Cases, crowds and random programs by their names; all if there is no pattern.

    ``random/<seed>`` names a random program whatever ``num_seeds`` is. Raises SpecError for a pattern that matches
    nothing, with the nearest names.
    """
    known = {program.name: program for program in programs}
    names = [*known, *CROWD_NAMES, *(f"{NAME_PREFIX}{seed}" for seed in range(num_seeds))]
    chosen = dict.fromkeys(names if not patterns else ())
    for pattern in patterns:
        matching = [name for name in names if fnmatchcase(name, pattern)]
        if not matching and _RANDOM_CASE.match(pattern):
            matching = [pattern]
        if not matching:
            raise SpecError(f"--case {pattern!r} matches nothing: {_nearest(pattern, names)}")
        chosen |= dict.fromkeys(matching)
    return [ProgramJob(known.get(name) or _generated(name)) for name in chosen]


def run_all(jobs: Sequence[Job], executors: Mapping[str, ExecutorFactory]) -> Iterator[tuple[Row, Failure | None]]:
    """All jobs on all executors. An executor serves many jobs, as ``allocate`` forgets everything; after a failure a
    new one takes its place.
    """
    for name, make in executors.items():
        executor: Executor | None = None
        for job in jobs:
            try:
                executor = make() if executor is None else executor
            except (Exception, SystemExit) as error:
                yield _not_made(job, name, error)
                continue
            row, failure = run_job(job, name, executor)
            if failure:
                executor = None
            yield row, failure


def run_job(job: Job, executor_name: str, executor: Executor) -> tuple[Row, Failure | None]:
    """One job on one executor."""
    return carry_out(job.name, job.arguments, executor_name, job.start(executor))


def carry_out(name: str, arguments: Sequence[str], executor_name: str, run: Run) -> tuple[Row, Failure | None]:
    """One run, whatever comes of it. ``arguments``: what the command line needs to run it alone."""
    status: Status = "passed"
    trace = ""
    difference: Mismatch | None = None
    try:
        run.run()
    except Mismatch as error:
        status, difference = "failed", error
    except (Exception, SystemExit) as error:  # the executor's own fault, whatever it is: the other cases must go on
        status, difference, trace = "error", _unexpected(error), _own_traceback(error)
    row = Row(name, executor_name, status, run.step_number, run.fingerprint_so_far)
    if difference is None:
        return row, None
    return row, _failure(row, run.step_text(), arguments, difference, trace)


def _not_made(job: Job, executor_name: str, error: BaseException) -> tuple[Row, Failure]:
    """A job for which no new executor could be made, after the last one had failed."""
    row = Row(job.name, executor_name, "error", 0, "")
    return row, _failure(row, "make the executor", job.arguments, _unexpected(error), _own_traceback(error))


def _unexpected(error: BaseException) -> Mismatch:
    got = f"{type(error).__name__}: {error}"
    return Mismatch("T-8", "an executor raises a SpecError or nothing", "no such error", got)


def _own_traceback(error: BaseException) -> str:
    """Where the executor raised, without the suite's frames above it; all of them if the error is the suite's own."""
    own = here = error.__traceback__
    while here is not None:
        if Path(here.tb_frame.f_code.co_filename).parent == _SUITE:
            own = here.tb_next
        here = here.tb_next
    return "".join(traceback.format_exception(type(error), error, own or error.__traceback__))


def _failure(row: Row, op: str, arguments: Sequence[str], difference: Mismatch, trace: str) -> Failure:
    return Failure(
        case=row.case,
        executor=row.executor,
        rule=difference.rule,
        step=row.steps,
        op=op,
        what=difference.what,
        expected=difference.expected,
        got=difference.got,
        rerun=shlex.join(["vtoken", "conformance", "--executor", row.executor, *arguments]),
        traceback=trace,
    )


def _generated(name: str) -> Program:
    return generate_crowd(name) if name in CROWD_NAMES else generate(_seed(name))


def _seed(name: str) -> int:
    match = _RANDOM_CASE.match(name)
    if match is None:
        raise SpecError(f"case {name!r} is neither in the suite nor {NAME_PREFIX}<seed>")
    return int(match[1])


def _nearest(pattern: str, names: Sequence[str]) -> str:
    close = difflib.get_close_matches(pattern, names, n=3, cutoff=0.4)
    chapters = sorted({name.split("/")[0] for name in names})
    return f"nearest are {', '.join(close)}" if close else f"chapters are {', '.join(chapters)}"
