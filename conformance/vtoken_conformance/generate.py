"""Random legal programs: the same seed gives the same program, on any machine.

A model without executor walks along, so that most steps are legal and the others are known to be refused. Few shapes,
so that an executor that compiles for each of them does so once.
"""

from random import Random
from typing import Any

from vtoken.errors import PoolExhausted
from vtoken.executor import KVSpec
from vtoken.types import ReqId
from vtoken_conformance.bits import Bits, is_special
from vtoken_conformance.model import Model
from vtoken_conformance.planning import PLANNERS, expected_change
from vtoken_conformance.program import Program, Step
from vtoken_conformance.shapes import CROWDS, MAX_REQS, SPECS
from vtoken_conformance.state import Change, Refusal, Request

__all__ = ["CROWD_NAMES", "NAME_PREFIX", "generate", "generate_crowd"]

NAME_PREFIX = "random/"
CROWD_NAMES = tuple(f"crowd/{block_size}" for block_size in CROWDS)
NUM_STEPS = 44
_NUM_CROWD_STEPS = 150
_NUM_CROWD_CHECKS = 6  # each reads all requests back
_WEIGHTS = {
    "admit": 3,
    "append": 11,
    "decode": 5,
    "doom": 6,
    "kill": 8,
    "recycle": 7,
    "launch": 12,
    "advance": 3,
    "reap": 2,
    "settle": 1,
    "fork": 5,
    "preempt": 1,
    "finish": 1,
    "mistake": 1,
}
_MISTAKES = ("admit", "kill", "doom", "fork", "attend")


def generate(seed: int) -> Program:
    """Some 44 steps over a few requests: forks, both regimes, all planners, an exhausted pool, refused calls."""
    rng = Random(seed)
    writer = _Writer(rng, rng.choice(SPECS))
    while len(writer.steps) < NUM_STEPS:
        getattr(writer, rng.choices(list(_WEIGHTS), list(_WEIGHTS.values()))[0])()
    if rng.random() < 0.5:
        writer.finish_all()
    bits: Bits = rng.choice(("finite", "finite", "special", "special", "special", "random"))
    return Program(
        name=f"{NAME_PREFIX}{seed}",
        spec=writer.model.spec,
        steps=tuple(writer.steps),
        bits=bits,
        seed=seed,
        description="a random legal program",
    )


def generate_crowd(name: str) -> Program:
    """64 requests at once, named after its block size: all are admitted and written first, then anything happens."""
    block_size = int(name.rpartition("/")[2])
    rng = Random(block_size)
    writer = _Writer(rng, CROWDS[block_size])
    while len(writer.model.requests) < len(writer.names):
        writer.admit()
    for req_id in list(writer.model.requests):
        writer.append_to(req_id, rng.randint(1, 2 * block_size))
    while len(writer.steps) < 2 * len(writer.names) + _NUM_CROWD_STEPS:
        getattr(writer, rng.choices(list(_WEIGHTS), list(_WEIGHTS.values()))[0])()
    return Program(
        name=name,
        spec=writer.model.spec,
        steps=tuple(writer.steps),
        bits="special",
        seed=block_size,
        description="a random legal program of 64 requests",
        check_every=len(writer.steps) // _NUM_CROWD_CHECKS,
    )


class _Writer:
    """Each method appends one kind of step, or nothing where none is possible now."""

    def __init__(self, rng: Random, spec: KVSpec) -> None:
        self.rng = rng
        self.model = Model(spec)
        self.steps: list[Step] = []
        num_reqs = spec.max_num_reqs
        self.names = [*"abcd"[:num_reqs]] if num_reqs <= MAX_REQS else [f"r{number}" for number in range(num_reqs)]
        self.admit()

    def admit(self) -> None:
        absent = [name for name in self.names if name not in self.model.requests]
        if absent:
            self._call("admit", req=self.rng.choice(absent))

    def append(self) -> None:
        self._append(self.rng.randint(1, 2 * self.model.spec.block_size + 1))

    def decode(self) -> None:
        self._append(1)

    def doom(self) -> None:
        if (req_id := self._some_request()) is not None:
            request = self.model.requests[req_id]
            self._victims("doom", req_id, [p for p in request.kv if p not in request.doomed])

    def kill(self) -> None:
        if (req_id := self._some_request()) is None:
            return
        request = self.model.requests[req_id]
        pool = list(range(request.num_computed)) if self.rng.random() < 0.2 else list(request.kv)
        style = self.rng.random()
        if style < 0.2:  # what is no ordinary number, so that attention sees ordinary ones alone
            pool = [position for position in pool if is_special(position)]
        if style < 0.6:
            self._victims("kill", req_id, pool)
        elif pool:  # most of a run of tokens, so that blocks empty
            start = self.rng.randrange(len(pool))
            run = pool[start : start + 4 * self.model.spec.block_size]
            self._call("kill", req=req_id, positions=self.rng.sample(run, -(-len(run) * 3 // 4)))

    def recycle(self) -> None:
        doomed = [name for name, request in self.model.requests.items() if request.doomed]
        if doomed:
            self._call("recycle", req=self.rng.choice(doomed))

    def launch(self) -> None:
        pairs = [(req_id, planner) for req_id in self.model.requests for planner in PLANNERS]
        useful = [pair for pair in pairs if self._plan(*pair, self.model.num_free) is not None]
        if not pairs:
            return
        if useful and self.rng.random() < 0.8:
            wanted = self.rng.choice(sorted({planner for _, planner in useful}))
            pairs = [pair for pair in useful if pair[1] == wanted]
        req_id, planner = self.rng.choice(pairs)
        low = max(0, self.model.num_free - len(self.model.freed_in_pass))
        if self._plan(req_id, planner, low) != self._plan(req_id, planner, self.model.num_free):
            self._call("advance")  # else the plan would depend on the order of the executor's free list
        change = self._plan(req_id, planner, self.model.num_free)
        self.steps.append(Step("launch", {"req": req_id, "planner": planner}))
        if change is not None:
            self.model.apply(req_id, change)

    def advance(self) -> None:
        self._call("advance")

    def reap(self) -> None:
        self._call("reap")

    def settle(self) -> None:
        self._call("settle")

    def fork(self) -> None:
        size = self.model.spec.block_size
        absent = [name for name in self.names if name not in self.model.requests]
        parents = [(name, self._prefix_blocks(request)) for name, request in self.model.requests.items()]
        parents = [(name, count) for name, count in parents if count]
        if absent and parents:
            parent, count = self.rng.choice(parents)
            tokens = self.rng.randint(1, count) * size
            self._call("fork", req=parent, child=self.rng.choice(absent), tokens=tokens)

    def preempt(self) -> None:
        if (req_id := self._some_request()) is not None:
            self._call("preempt", req=req_id)

    def finish(self) -> None:
        if (req_id := self._some_request()) is not None:
            self._call("finish", req=req_id)

    def finish_all(self) -> None:
        for req_id in list(self.model.requests):
            self._call("finish", req=req_id)
        self._call("settle")

    def mistake(self) -> None:
        """A call that is refused, whatever the state."""
        if (req_id := self._some_request()) is None:
            return
        end = self.model.requests[req_id].num_computed
        wrong: dict[str, dict[str, Any]] = {
            "admit": {"req": req_id},
            "kill": {"req": req_id, "positions": [end]},
            "doom": {"req": req_id, "positions": [0, 0] if end else [0]},
            "fork": {"req": req_id, "child": req_id, "tokens": self.model.spec.block_size},
            "attend": {"req": req_id, "queries": end + 1},
        }
        op = self.rng.choice(_MISTAKES)
        self.steps.append(Step(op, wrong[op], "SpecError"))

    # -- parts -------------------------------------------------------------------------------------------------------

    def _some_request(self) -> ReqId | None:
        return self.rng.choice(list(self.model.requests)) if self.model.requests else None

    def _plan(self, req_id: ReqId, planner: str, num_targets: int) -> Change | None:
        return expected_change(planner, self.model, req_id, num_targets)

    def _append(self, num_tokens: int) -> None:
        if (req_id := self._some_request()) is not None:
            self.append_to(req_id, num_tokens)

    def append_to(self, req_id: ReqId, num_tokens: int) -> None:
        self._call("append", req=req_id, tokens=num_tokens)

    def _victims(self, op: str, req_id: ReqId, pool: list[int]) -> None:
        if pool:
            count = self.rng.randint(1, min(len(pool), 2 * self.model.spec.block_size))
            self._call(op, req=req_id, positions=self.rng.sample(pool, count))

    def _prefix_blocks(self, request: Request) -> int:
        size = self.model.spec.block_size
        in_place = [row == list(range(index * size, index * size + size)) for index, row in enumerate(request.rows)]
        return [*in_place, False].index(False)

    def _call(self, op: str, **args: Any) -> None:
        error = None
        try:
            self._apply(op, args)
        except Refusal as refusal:
            error = "PoolExhausted" if refusal.error is PoolExhausted else "SpecError"
        self.steps.append(Step(op, args, error))

    def _apply(self, op: str, args: dict[str, Any]) -> None:
        model, req_id = self.model, args.get("req", "")
        token = bytes(model.spec.token_bytes)
        if op == "admit":
            model.admit(req_id)
        elif op == "append":
            model.append(req_id, [token] * args["tokens"])
        elif op == "recycle":
            model.recycle(req_id, [token])
        elif op == "doom":
            model.doom(req_id, args["positions"])
        elif op == "kill":
            model.kill(req_id, args["positions"])
        elif op == "fork":
            model.fork_prefix(req_id, args["child"], args["tokens"])
        elif op in ("preempt", "finish"):
            model.finish(req_id)
        else:
            if op in ("advance", "settle"):
                model.advance()
            if op in ("reap", "settle"):
                model.reap(model.due())
