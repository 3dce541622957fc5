"""One program through both executors: append, attend, fingerprint, move; the same bytes, the same plans."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from vtoken.errors import SpecError
from vtoken.executor import Executor, KVSpec
from vtoken.reclamation import get_planner
from vtoken.reclamation.plan import ReclamationPlan
from vtoken.types import cdiv
from vtoken_bench.executors.comparison import Clock, Comparison, Elapsed, GateError, Samples, bytes_row
from vtoken_bench.executors.sides import Side
from vtoken_bench.timing import interleaved
from vtoken_conformance.attention import TOLERANCE, attention
from vtoken_conformance.fingerprint import fingerprint

__all__ = ["Program", "compare_program", "make_spec"]

_OPERATIONS = ("append", "attend", "fingerprint", "move")
_FEW_TOKENS = 32
"""Of each request: the least of which a plan gives a block back. What they take is the cost of the calls."""


def make_spec(dtype: Any, batch: int, live: int) -> KVSpec:
    """Four layers of SmolLM2's shape, and room for ``batch`` requests of ``live`` tokens."""
    return KVSpec(
        num_layers=4, num_kv_heads=3, num_query_heads=9, head_size=64, dtype=dtype, block_size=16,
        num_blocks=batch * cdiv(live, 16) + 1, max_num_reqs=batch,
    )  # fmt: skip


class Program:
    """``batch`` requests get ``live`` tokens, are attended and fingerprinted, lose every second token, are compacted.

    Each cycle begins with empty requests, so that all do the same work.
    """

    def __init__(self, spec: KVSpec, batch: int, live: int, seed: int = 0) -> None:
        if live < 2:
            raise SpecError(f"live={live}: give at least 2 tokens")
        self.spec, self.batch, self.live = spec, batch, live
        rng = np.random.default_rng(seed)
        values = rng.standard_normal((live + batch, spec.token_elements), np.float32)
        self._kv = memoryview(_in_dtype(values, spec.dtype)).cast("B")
        self.query = rng.standard_normal(spec.query_elements, np.float32).tobytes()

    def kv(self, request: int) -> memoryview:
        """The bytes of one request: another stretch of the same tokens for each."""
        size = self.spec.token_bytes
        return self._kv[request * size : (request + self.live) * size]

    def begin(self, executor: Executor) -> None:
        """Empties the requests that there are."""
        for request in map(str, range(self.batch)):
            executor.preempt(request)
            executor.admit(request)

    def append(self, executor: Executor) -> None:
        """All tokens of all requests."""
        for request in range(self.batch):
            executor.append(str(request), self.live, self.kv(request))

    def attend(self, executor: Executor) -> list[Any]:
        """The newest token of each request."""
        return [executor.attend(str(request), self.query) for request in range(self.batch)]

    def fingerprint(self, executor: Executor) -> list[str]:
        """Of each request."""
        return [executor.fingerprint(str(request)) for request in range(self.batch)]

    def plans(self, executor: Executor) -> list[ReclamationPlan]:
        """Kills every second token, and plans how blocks come back."""
        planner, found = get_planner("fill"), []
        for request in map(str, range(self.batch)):
            executor.kill(request, range(0, self.live - 1, 2))
            plan = planner.plan(executor.table_view(request), executor.pool_view())
            if plan is None:
                raise GateError(f"{executor.name}: nothing to move in a half-dead request of {self.live} tokens")
            found.append(plan)
        return found

    def move(self, executor: Executor, plans: Sequence[ReclamationPlan]) -> None:
        """Launches the plans."""
        for plan in plans:
            executor.launch(plan)

    def end(self, executor: Executor) -> None:
        """Ends the step: what the plans gave up is free."""
        executor.advance()
        executor.reap()


def compare_program(
    jax: Side, torch: Side, program: Program, clock: Clock, memcpy: Callable[[int], Callable[[], object]],
    repeats: int, params: dict[str, Any], on_round: Callable[[], object] = lambda: None,
) -> list[Comparison]:  # fmt: skip
    """Checks a whole cycle, then times cycles, one operation on either executor in turn, and such of few tokens.

    ``memcpy(n)`` makes work that copies ``n`` bytes where the pool lies.

    Raises:
        GateError: fingerprints, plans or attention are not as they should be; nothing was timed.
    """
    sides = (jax, torch)
    for side in sides:
        side.executor.allocate(program.spec)
        for request in range(program.batch):
            side.executor.admit(str(request))
    num_moves = _gate(sides, program)
    size = program.spec.token_bytes
    touched = program.batch * program.live * size
    copies = {"append": memcpy(touched), "attend": memcpy(touched), "fingerprint": memcpy(touched)}
    copies["move"] = memcpy(num_moves * size)
    samples = {name: _samples() for name in _OPERATIONS}
    few = Program(program.spec, program.batch, min(program.live, _FEW_TOKENS))

    def cycle() -> float:
        calls = {name: samples[name].parts["calls"] for name in _OPERATIONS}
        _cycle(sides, few, clock, calls)
        _cycle(sides, program, clock, {name: (samples[name].jax, samples[name].torch) for name in _OPERATIONS})
        for name, copy in copies.items():
            samples[name].parts["memcpy"][0].append(clock(copy))
        return 0.0

    interleaved([cycle], repeats, on_round)
    _same("fingerprint after the timed cycles", *(program.fingerprint(side.executor) for side in sides))
    for each in samples.values():
        each.drop_first()
    rows = [samples[name].row(f"{name}_us", params) for name in _OPERATIONS]
    return [*rows, bytes_row("pool_bytes", params, jax.pool_bytes(), torch.pool_bytes())]


def _samples() -> Samples:
    copies = list[Elapsed]()
    return Samples(parts={"calls": ([], []), "memcpy": (copies, copies)})


def _cycle(
    sides: Sequence[Side], program: Program, clock: Clock, into: Mapping[str, tuple[list[Elapsed], list[Elapsed]]]
) -> None:
    works = [_works(side, program) for side in sides]
    for name in _OPERATIONS:
        for work, times in zip(works, into[name], strict=True):
            if name == "move":
                work["plan"]()
            times.append(clock(work[name]))
    for side in sides:
        program.end(side.executor)


def _works(side: Side, program: Program) -> dict[str, Callable[[], object]]:
    """One cycle's operations, each finished on the device when it returns; ``begin`` is done."""
    executor, plans = side.executor, list[ReclamationPlan]()
    program.begin(executor)
    side.settle()

    def settled(work: Callable[[], object]) -> Callable[[], object]:
        return lambda: (work(), side.settle())

    return {
        "append": settled(lambda: program.append(executor)),
        "attend": settled(lambda: program.attend(executor)),
        "fingerprint": settled(lambda: program.fingerprint(executor)),
        "plan": settled(lambda: plans.extend(program.plans(executor))),
        "move": settled(lambda: program.move(executor, plans)),
    }


def _gate(sides: Sequence[Side], program: Program) -> int:
    """One cycle, checked; returns how many tokens move in it."""
    expected = _Expected(program)
    executors = [side.executor for side in sides]
    for executor in executors:
        program.begin(executor)
        program.append(executor)
        expected.check(executor, range(program.live), "appended")
    _same("fingerprints", *map(program.fingerprint, executors))
    plans = [program.plans(executor) for executor in executors]
    _same("plans", *[[plan.moves for plan in each] for each in plans])
    for executor, each in zip(executors, plans, strict=True):
        program.move(executor, each)
        program.end(executor)
        left = [position for position in range(program.live) if position % 2 or position == program.live - 1]
        expected.check(executor, left, "compacted")
    _same("fingerprints after the moves", *map(program.fingerprint, executors))
    return sum(len(plan.moves) for plan in plans[0])


class _Expected:
    """What the first request gives, worked out from the bytes that it was given."""

    def __init__(self, program: Program) -> None:
        self._program = program
        size, kv = program.spec.token_bytes, program.kv(0)
        self._tokens = [bytes(kv[position * size :][:size]) for position in range(program.live)]

    def check(self, executor: Executor, live: Sequence[int], when: str) -> None:
        """Raises GateError where fingerprint or attention is another."""
        kv = {position: self._tokens[position] for position in live}
        _same(f"{executor.name}, {when}: fingerprint", executor.fingerprint("0"), fingerprint(kv))
        spec, query = self._program.spec, self._program.query
        out, _ = attention(spec, kv, query, [self._program.live - 1])
        got = np.asarray(executor.attend("0", query).out, np.float64)
        worst, allowed = np.abs(got - out.ravel()).max(), TOLERANCE[spec.dtype] * np.abs(out).max()
        if not worst <= allowed:
            raise GateError(f"{executor.name}, {when}: attention is {worst:.3g} off, {allowed:.3g} is allowed (A-4)")


def _same(what: str, first: object, second: object) -> None:
    if first != second:
        raise GateError(f"{what}: {str(first)[:80]} is not {str(second)[:80]}")


def _in_dtype(values: Any, dtype: str) -> bytes:
    if dtype == "float16":
        return bytes(values.astype(np.float16).tobytes())
    if dtype == "bfloat16":
        return bytes((values.view(np.uint32) >> 16).astype(np.uint16).tobytes())
    return bytes(values.tobytes())
