"""One process that runs steps and tells its parent of each. It ends at the first that fails: a fault of the device may
spoil what comes after.
"""

import os
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from time import monotonic
from typing import Literal

from vtoken.plugins import first_line
from vtoken_bench.gpu_check.ground import Ground, LeftOut
from vtoken_bench.gpu_check.step import Step
from vtoken_bench.record import Row

__all__ = ["Outcome", "Status", "run_step", "work"]

Status = Literal["good", "rehearsed", "FAILED", "OVERRAN", "left out"]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a step.

    Attributes:
        num_checks: that were made.
        findings: what failed, and why.
        figures: measured; none in a rehearsal.
        notes: what was left out, and why.
        seconds: wall time, compilation included; None in a rehearsal.
    """

    step: Step
    status: Status
    num_checks: int = 0
    findings: Sequence[str] = ()
    figures: Sequence[Row] = ()
    notes: Sequence[str] = field(default=())
    seconds: float | None = None

    @property
    def is_bad(self) -> bool:
        return self.status in ("FAILED", "OVERRAN")


def run_step(step: Step, is_dry: bool) -> Outcome:
    """Runs a step here; whatever it raises becomes a finding."""
    ground, start = Ground(is_dry), monotonic()
    findings: list[str] = []
    try:
        step.load()(ground)
    except LeftOut as reason:
        return Outcome(step, "left out", notes=[str(reason)])
    except (Exception, SystemExit) as error:  # a kernel may raise anything; the other steps must go on
        findings.append(f"{type(error).__name__}: {first_line(error)}")
        traceback.print_exc()
    findings += [f"{check.what}: {check.detail or 'no'}" for check in ground.checks if not check.good]
    if not ground.checks and not ground.figures and not findings and not is_dry:
        findings.append("checked and measured nothing")
    status: Status = "FAILED" if findings else "rehearsed" if is_dry else "good"
    seconds = None if is_dry else round(monotonic() - start, 1)
    return Outcome(step, status, len(ground.checks), findings, ground.figures, ground.notes, seconds)


def work(connection: Connection, steps: Sequence[Step], is_dry: bool, log: Path) -> None:
    """The process: sends a step's ``Outcome`` after each."""
    _into(log)
    if is_dry:  # before Triton and JAX are imported
        os.environ.update(TRITON_INTERPRET="1", JAX_PLATFORMS="cpu", OMP_NUM_THREADS="1")
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # another process needs memory, too
    for step in steps:
        outcome = run_step(step, is_dry)
        connection.send(outcome)
        if outcome.is_bad:
            return


def _into(log: Path) -> None:
    """All that is printed, by libraries below Python as well."""
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
