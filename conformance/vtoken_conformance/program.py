"""Programs: a shape, a kind of bits, and steps as data. ``ProgramRun`` walks one through a checked executor."""

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from vtoken.errors import SpecError
from vtoken.executor import KVSpec
from vtoken.reclamation import get_planner
from vtoken.reclamation.plan import ReclamationPlan
from vtoken.types import ReqId
from vtoken_conformance.bits import Bits, make_queries, make_token
from vtoken_conformance.checked import CheckedExecutor
from vtoken_conformance.expectation import compare_expectation
from vtoken_conformance.mismatch import Mismatch, compare_equal
from vtoken_conformance.tamper import tampered

__all__ = ["Program", "ProgramRun", "Step"]


@dataclass(frozen=True, slots=True)
class Step:
    """One operation by name, with its arguments; ``error`` names the error that it must raise, changing nothing."""

    op: str
    args: Mapping[str, Any] = field(default_factory=dict)
    error: str | None = None

    def __str__(self) -> str:
        words = [f"{key}={value}" for key, value in self.args.items()]
        return " ".join([self.op, *words, *([f"-> {self.error}"] if self.error else [])])


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """What to run. ``rule`` is the SPEC rule that it shows, ``expect`` what the end looks like.

    ``check_every`` is ``CheckedExecutor``'s.
    """

    name: str
    spec: KVSpec
    steps: tuple[Step, ...]
    bits: Bits = "finite"
    seed: int = 0
    rule: str = "SPEC"
    description: str = ""
    expect: Mapping[str, Any] = field(default_factory=dict)
    check_every: int = 1


class ProgramRun:
    """Runs one program. ``step_number`` counts from 1; it stands at the step that failed if one does."""

    def __init__(self, program: Program, executor: CheckedExecutor) -> None:
        self.program = program
        self.executor = executor
        self.step_number = 0
        self._kept: dict[ReqId, ReclamationPlan] = {}
        self._incarnations: Counter[ReqId] = Counter()
        self._run_op: dict[str, Callable[..., object]] = {
            "admit": self._admit,
            "append": self._append,
            "doom": lambda req, positions: executor.doom(req, positions),
            "kill": lambda req, positions: executor.kill(req, positions),
            "recycle": lambda req: executor.recycle(req, self._kv(req, 1)),
            "launch": self._launch,
            "plan": self._plan,
            "launch_kept": self._launch_kept,
            "advance": executor.advance,
            "reap": executor.reap,
            "settle": executor.settle,
            "fork": self._fork,
            "preempt": lambda req: executor.preempt(req),
            "finish": lambda req: executor.finish(req),
            "attend": self._attend,
            "expect": lambda **expected: compare_expectation(expected, executor, program.rule),
        }

    @property
    def fingerprint_so_far(self) -> str:
        return self.executor.fingerprint_so_far

    def run(self) -> None:
        """All steps, then the expected end. Raises Mismatch at the first difference."""
        self.executor.allocate(self.program.spec)
        for step in self.program.steps:
            self.step_number += 1
            self._run_step(step)
        compare_expectation(self.program.expect, self.executor, self.program.rule)

    def step_text(self) -> str:
        """The step at hand, for a report."""
        return str(self.program.steps[self.step_number - 1]) if self.step_number else "allocate"

    def _run_step(self, step: Step) -> None:
        try:
            self._run_op[step.op](**step.args)
        except SpecError as error:  # the executor and the model agree that this is refused
            got = f"{type(error).__name__}: {error}"
            if type(error).__name__ != step.error:
                raise Mismatch(self.program.rule, f"error of {step.op}", step.error or "none", got) from error
        else:
            compare_equal(self.program.rule, f"error of {step.op}", step.error, None)

    def _kv(self, req: ReqId, num_tokens: int) -> bytes:
        """KV of the request's next positions, as if it were computed now; of an unknown request, from its first on."""
        known = self.executor.model.requests.get(req)
        start = known.num_computed if known else 0
        program, key = self.program, f"{self.program.seed}/{req}/{self._incarnations[req]}"
        return b"".join(
            make_token(program.spec, program.bits, key, position) for position in range(start, start + num_tokens)
        )

    def _admit(self, req: ReqId) -> None:
        self.executor.admit(req)
        self._incarnations[req] += 1

    def _fork(self, req: ReqId, child: ReqId, tokens: int) -> None:
        self.executor.fork_prefix(req, child, tokens)
        self._incarnations[child] += 1

    def _append(self, req: ReqId, tokens: int, kv_tokens: int | None = None) -> None:
        self.executor.append(req, tokens, self._kv(req, tokens if kv_tokens is None else kv_tokens))

    def _launch(self, req: ReqId, planner: str, moves: int | None = None, planned: bool | None = None) -> None:
        plan = self._make_plan(req, planner)
        if planned is not None:
            compare_equal(self.program.rule, f"a plan of {planner} is made", planned, plan is not None)
        if plan is not None:
            self.executor.launch(plan)
        if moves is not None:
            compare_equal(self.program.rule, f"moves of {planner}", moves, len(plan.moves) if plan else 0)

    def _plan(self, req: ReqId, planner: str) -> None:
        plan = self._make_plan(req, planner)
        if plan is None:
            raise Mismatch(self.program.rule, f"plan of {planner} to keep", "a plan", "none")
        self._kept[req] = plan

    def _launch_kept(self, req: ReqId, tamper: str | None = None) -> None:
        plan = self._kept[req]
        self.executor.launch(tampered(tamper, plan, self.executor) if tamper else plan)

    def _make_plan(self, req: ReqId, planner: str) -> ReclamationPlan | None:
        plan = get_planner(planner).plan(self.executor.table_view(req), self.executor.pool_view())
        self.executor.check_plan(req, planner, plan)
        return plan

    def _attend(self, req: ReqId, queries: int) -> None:
        q = make_queries(self.program.spec, f"{self.program.seed}/{req}", max(queries, 0))
        self.executor.attend(req, q, queries)
