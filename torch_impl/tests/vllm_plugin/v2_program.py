"""Model runner V2 on the CPU, through Triton's interpreter, which must be chosen before Triton is imported.

python v2_program.py FOLDER_OF_A_TINY_LLAMA prints one JSON object: what each case did, or its error.
"""

import copy
import json
import os
import random
import sys
import traceback
from collections import Counter
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

os.environ |= {"TRITON_INTERPRET": "1", "VLLM_USE_V2_MODEL_RUNNER": "1"}
from triton import backends
from vllm_addresses import watched_addresses
from vllm_fuzz import run_seed
from vllm_mass import MassWatch
from vllm_reference import Reference
from vllm_world import World

# vLLM, imported later, turns Triton off unless a backend is active here; the interpreter needs none.
backends.backends["cpu"] = SimpleNamespace(driver=SimpleNamespace(is_active=lambda: True), compiler=None)

SCATTERED = {"policy": "random", "kv_budget": 50, "recent": 8, "interval": 8, "when": "always"}
FRONT = {"policy": "streaming_llm", "kv_budget": 60, "interval": 8, "when": "always"}
NUM_FUZZ_SEEDS = int(os.environ.get("VTOKEN_V2_FUZZ_SEEDS", "2"))  # more by `make fuzz`
Report = dict[str, Any]


def addresses(cases: "Cases") -> Report:
    """Two policies together, for more than 200 steps."""
    with cases.world(SCATTERED) as engine, watched_addresses() as seen:
        engine.submit(cases.tokens(100), 210)
        engine.submit(cases.tokens(70), 205, vtoken_policy="streaming_llm", vtoken_budget=90)
        engine.run()
        return {**cases.verdict(engine), "addresses": {name: len(found) for name, found in seen.items()}}


def chunked(cases: "Cases") -> Report:
    with cases.world(FRONT, max_num_batched_tokens=64) as engine:
        for length in (180, 40, 90):
            engine.submit(cases.tokens(length), 12)
        engine.run()
        return cases.verdict(engine)


def preempted(cases: "Cases") -> Report:
    """Under verification."""
    with cases.world({**FRONT, "kv_budget": 140, "verify": True}, num_blocks=17) as engine:
        for _ in range(4):
            engine.submit(cases.tokens(120), 30)
        engine.run(abort_at={20: 1})
        return cases.verdict(engine)


def asynchronous(cases: "Cases") -> Report:
    """The same shortage, with a step in flight at all times."""
    settings = {"num_blocks": 17, "async_scheduling": True, "enable_prefix_caching": True}
    with cases.world({**FRONT, "kv_budget": 140}, **settings) as engine:
        for _ in range(4):
            engine.submit(cases.tokens(120), 30)
        engine.run(abort_at={20: 1})
        return cases.verdict(engine)


def cached(cases: "Cases") -> Report:
    settings = {"num_blocks": 20, "max_num_batched_tokens": 100, "enable_prefix_caching": True}
    prefix = cases.tokens(100)
    with cases.world({**SCATTERED, "kv_budget": 70}, **settings) as engine:
        for count in (30, 3, 61):
            engine.submit(prefix + cases.tokens(count), 20)
        engine.submit(prefix + cases.tokens(20), 5, vtoken_off=True)
        engine.run()
        return cases.verdict(engine)


def mass(cases: "Cases") -> Report:
    """Of all queries, and of sampled ones."""
    done = Counter[str]()
    for source in ({}, {"signal_source": "score_pass", "score_every": 5}):
        with cases.world({**FRONT, "policy": "h2o", **source}) as engine:
            seen = MassWatch(engine, every=engine.scheduler.gate.capacity.mass_every)
            engine.submit(cases.tokens(110), 20)
            engine.submit(cases.tokens(90), 16, vtoken_policy="tova")
            engine.run()
            verdict = cases.verdict(engine)
            runner = verdict.pop("runner")
            done.update(verdict)
            done["choices"] += (num_choices := seen.assert_chosen_by(cases.reference))
            done["sampled choices"] += bool(source) and num_choices
    return {**done, "runner": runner}


def lazy(cases: "Cases") -> Report:
    """Holes and evacuation, in step and not, under verification; one request's policy looks at attention."""
    done = Counter[str]()
    for is_async in (False, True):
        settings = {"num_blocks": 15, "enable_prefix_caching": True, "async_scheduling": is_async}
        prefix = cases.tokens(70)
        with cases.world({**SCATTERED, "mode": "lazy", "verify": True}, **settings) as engine:
            seen = MassWatch(engine)
            for length, policy in ((50, "random"), (40, "h2o"), (64, "streaming_llm"), (60, "none")):
                engine.submit(prefix + cases.tokens(length), 60, vtoken_policy=policy)
            engine.run(abort_at={20: 0})
            verdict = cases.verdict(engine)
            runner = verdict.pop("runner")
            done.update(verdict)
            done["choices"] += seen.assert_chosen_by(cases.reference)
            done["evicted"] += engine.scheduler.vtoken.counters.num_evicted_tokens
    return {**done, "runner": runner}


def fuzz(cases: "Cases") -> Report:
    """Random engines, drawn as in ``test_fuzz.py``."""
    met, runners = Counter[str](), set[str]()

    def world(vtoken: Report, **settings: Any) -> World:
        engine = cases.world(vtoken, **settings)
        runners.add(_runner_of(engine))
        return engine

    for seed in range(NUM_FUZZ_SEEDS):
        try:
            met.update(run_seed(world, cases.reference, seed)[0])
        except Exception as error:
            error.add_note(f"seed {seed}")
            raise
    (runner,) = runners
    return {**met, "runner": runner}


def mutants(cases: "Cases") -> Report:
    """What the checks say of a runner in which one override does nothing."""
    from vtoken_torch.vllm_plugin.runner_v2 import EvictingRunnerV2

    def fresh_lengths(self: Any, input_batch: Any) -> Any:
        batch = copy.copy(with_live_lengths(self, input_batch))
        batch.seq_lens = batch.seq_lens.clone()
        return batch

    with_live_lengths = EvictingRunnerV2.with_live_lengths
    report: Report = {}
    with cases.world(SCATTERED) as engine:
        for name, mutant in (
            ("_count_live", lambda self, input_batch: input_batch),
            ("_aim_at_recycled", lambda self, slot_mappings: None),
            ("with_live_lengths", lambda self, input_batch: input_batch),
        ):
            with patch.object(EvictingRunnerV2, name, mutant):
                key = engine.submit(cases.tokens(70), 16)
                engine.run()
            try:
                engine.assert_exact(cases.reference, keys=[key])
            except AssertionError as error:
                report[name] = str(error)
        with patch.object(EvictingRunnerV2, "with_live_lengths", fresh_lengths), watched_addresses() as seen:
            engine.submit(cases.tokens(70), 5)
            engine.run()
        return {**report, "addresses": {name: len(found) for name, found in seen.items()}}


def _runner_of(engine: World) -> str:
    return type(engine.runner).__mro__[1].__name__


class Cases:
    def __init__(self, model_dir: str) -> None:
        self.model_dir = model_dir
        self.reference = Reference(model_dir)
        self._draw = random.Random(7)

    def world(self, vtoken: Report, **settings: Any) -> World:
        return World(self.model_dir, vtoken, **settings)

    def tokens(self, count: int) -> list[int]:
        return [self._draw.randrange(3, 512) for _ in range(count)]

    def verdict(self, engine: World) -> Report:
        """What happened; every token was right, and every block is back."""
        engine.assert_exact(self.reference)
        engine.assert_nothing_left()
        side = engine.runner.vtoken
        done = {"moves": side.num_moved_tokens, "recycled": side.num_recycled_tokens}
        assert done == {name: engine.counts[name] for name in done}, f"the worker did {done}, not {engine.counts}"
        for part in engine.scheduler.parts:
            assert not getattr(part, "findings", None), part.findings
        num_cached = sum(outcome.num_cached for outcome in engine.outcomes.values())
        return {**engine.counts, "cached": num_cached, "runner": _runner_of(engine)}

    def run(self, *cases: Any) -> Report:
        report = {}
        for case in cases:
            try:
                report[case.__name__] = case(self)
            except Exception:  # a case that fails hides no other
                report[case.__name__] = {"error": traceback.format_exc()}
        return report


if __name__ == "__main__":
    all_cases = (addresses, chunked, preempted, asynchronous, cached, mass, lazy, fuzz, mutants)
    print(json.dumps(Cases(sys.argv[1]).run(*all_cases)))
