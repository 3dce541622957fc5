"""Runs steps in processes of their own, each under its time limit. None stops the others."""

from collections.abc import Iterator, Sequence
from multiprocessing import get_context
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from pathlib import Path
from time import monotonic

from vtoken_bench.gpu_check.step import Step
from vtoken_bench.gpu_check.worker import Outcome, work

__all__ = ["TOTAL_S", "conduct"]

TOTAL_S = 350.0
"""For all steps together."""

_LOG_LINES = 5


def conduct(steps: Sequence[Step], is_dry: bool, log: Path, total_s: float = TOTAL_S) -> Iterator[Outcome]:
    """Outcomes in the order of ``steps``. ``log`` takes what the processes print."""
    end = monotonic() + total_s
    left = list(steps)
    while left:
        group = [step for step in left if step.group == left[0].group]
        together = group[: next((i for i, step in enumerate(left) if step.group != left[0].group), len(left))]
        for outcome in _run_together(together, is_dry, log, end):
            left.pop(0)
            yield outcome


def _run_together(steps: Sequence[Step], is_dry: bool, log: Path, end: float) -> Iterator[Outcome]:
    """Steps of one process, up to the first that goes wrong."""
    context = get_context("spawn")  # a fork would inherit what the parent knows of the device
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=work, args=(theirs, steps, is_dry, log), daemon=False)
    process.start()
    theirs.close()
    try:
        for step in steps:
            outcome = _receive(ours, process, step, log, min(step.limit_s, end - monotonic()))
            yield outcome
            if outcome.is_bad:
                return
    finally:
        ours.close()
        process.join(5)
        process.kill()
        process.join()


def _receive(connection: Connection, process: SpawnProcess, step: Step, log: Path, limit_s: float) -> Outcome:
    if not connection.poll(max(limit_s, 0.0)):
        process.kill()
        why = f"not done after {limit_s:.0f} s" if limit_s > 0 else "no time was left"
        return Outcome(step, "OVERRAN", findings=[why])
    try:
        outcome: Outcome = connection.recv()
    except EOFError:
        process.join()
        lines = log.read_text(errors="replace").splitlines()[-_LOG_LINES:]
        return Outcome(step, "FAILED", findings=[f"its process ended with {process.exitcode}: {' | '.join(lines)}"])
    return outcome
