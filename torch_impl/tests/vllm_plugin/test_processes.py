"""Engine and workers in processes of their own: tensor parallelism, and what a refusal looks like from outside."""

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

from vtoken.config import VTokenConfig
from vtoken.trace import VictimTrace
from vtoken_torch.vllm_plugin.options import request_config

ENGINE = VTokenConfig(policy="streaming_llm", kv_budget=64, interval=8, when="always")  # of vllm_processes.py
OFF = {"vtoken_off": 1}
BATCHES = {  # lengths of prompts, tokens to say, settings
    "eager": [
        (100, 60, {"vtoken_budget": 64}),
        (140, 60, {"vtoken_policy": "random", "vtoken_budget": 50}),
        (200, 60, OFF),
        (90, 60, {"vtoken_policy": "h2o", "vtoken_budget": 50}),
        (130, 60, {"vtoken_policy": "tova", "vtoken_budget": 60}),
    ],
    "short": [*[(100, 300, OFF)] * 5, (110, 350, {"vtoken_policy": "random"}), (120, 350, {"vtoken_budget": 90})],
    "broken": [(90, 20, OFF), (120, 40, {"vtoken_policy": "random"})],
    "lazy": [
        (150, 40, {"vtoken_policy": "random"}),
        (100, 40, {"vtoken_policy": "h2o", "vtoken_budget": 50}),
        (80, 40, OFF),
    ],
}
REFUSED = """
if __name__ == "__main__":
    import sys
    from vllm import LLM
    from vllm_world import engine_settings

    enabled = engine_settings({"policy": "streaming_llm", "kv_budget": 64})
    LLM(sys.argv[1], **enabled | {"worker_cls": "auto"})
"""


def _run(*arguments, **environment):
    return subprocess.run(
        [sys.executable, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=900,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, [str(Path(__file__).parent), os.environ.get("PYTHONPATH")])),
            **environment,
        },
    )


class Ranks:
    """What ``vllm_processes.py`` did: the batches, and what was told to both ranks of each request."""

    def __init__(self, model_dir, trace, prompts):
        batches = {
            name: [(prompt, count, settings) for prompt, (_, count, settings) in zip(prompts[name], cases, strict=True)]
            for name, cases in BATCHES.items()
        }
        run = _run(Path(__file__).with_name("vllm_processes.py"), model_dir, trace, json.dumps(batches))
        assert run.returncode == 0, run.stderr[-4000:]
        self.batches, self.prompts, self.trace = json.loads(run.stdout.splitlines()[-1]), prompts, trace

    def done(self, name):
        """Of both ranks, since their engine's start: they did the same."""
        first, second = self.batches[name]["ranks"]
        assert first == second
        return first

    def outcomes(self, name, reference):
        """Each request's outcome by its number, held against the reference."""
        from vllm_world import Outcome, assert_outcome

        batch, epochs = self.batches[name], _epochs(self.done(name)["told"])
        assert batch["all_free"]
        found = {}
        for key, *outcome in zip(batch["keys"], self.prompts[name], batch["said"], batch["logprobs"], strict=True):
            found[key] = Outcome(*outcome, epochs[key])
            assert_outcome(reference, found[key], f"{name}, request {key}")
        return list(found.values())


def _epochs(told):
    from vllm_reference import Epoch

    epochs, end_of = {}, {}
    for key, is_start, first_new, end, dead in told:
        own = epochs.setdefault(key, [])
        if is_start:
            if own:
                own[-1].end = end_of[key]
            own.append(Epoch())
        own[-1].deaths += [(first_new, position) for position in dead]
        end_of[key] = end
    return epochs


@pytest.fixture(scope="module")
def ranks(tiny_llama, tmp_path_factory):
    if (os.cpu_count() or 1) < 2:
        pytest.skip("two ranks are bound to two CPU cores, here is one")
    draw = random.Random(7)
    prompts = {
        name: [[draw.randrange(3, 512) for _ in range(length)] for length, *_ in cases]
        for name, cases in BATCHES.items()
    }
    return Ranks(tiny_llama, tmp_path_factory.mktemp("ranks") / "trace", prompts)


@pytest.mark.slow
def test_two_tensor_parallel_ranks_carry_out_the_same_plans_and_stay_exact(ranks, reference):
    from vllm_mass import assert_trace_chosen_by

    outcomes = ranks.outcomes("eager", reference)
    done = ranks.done("eager")
    assert done["moved"] > 0, "no rank moved a token"
    assert done["recycled"] > 0, "no rank recycled a slot"
    events = VictimTrace.load(ranks.trace).events
    assert {key for key in events if key < 5} == {0, 1, 3, 4}
    for key in (3, 4):  # each rank sees half of the heads' attention, and their sum decides
        outcome, (_, _, settings) = outcomes[key], BATCHES["eager"][key]
        config = request_config(settings, ENGINE)
        tokens = outcome.prompt + outcome.tokens
        assert_trace_chosen_by(reference, events[key], tokens, len(outcome.prompt), config)


@pytest.mark.slow
def test_two_ranks_that_preempt_repeat_their_evictions(ranks, reference):
    outcomes = ranks.outcomes("short", reference)
    rebuilt = [outcome for outcome in outcomes[5:] if len(outcome.epochs) > 1]
    assert any(outcome.epochs[0].deaths and outcome.epochs[-1].deaths for outcome in rebuilt)


@pytest.mark.slow
def test_a_break_on_the_second_rank_alone_is_found_and_fails_its_request_alone(ranks):
    (finish, _), (broken, why) = ranks.batches["broken"]["ends"]
    assert (finish, broken) == ("length", "error")
    assert why.startswith("INV-1: fingerprint of ")


@pytest.mark.slow
def test_two_ranks_in_lazy_mode(ranks, reference):
    outcomes = ranks.outcomes("lazy", reference)
    assert [bool(outcome.epochs[0].deaths) for outcome in outcomes] == [True, True, False]
    assert ranks.done("lazy")["moved"] > 0, "nothing was evacuated"


@pytest.mark.slow
def test_a_refusal_in_the_engines_process_reaches_the_users_terminal(tiny_llama, tmp_path):
    program = tmp_path / "refused.py"
    program.write_text(REFUSED)
    run = _run(program, tiny_llama, VLLM_ENABLE_V1_MULTIPROCESSING="1", VLLM_LOGGING_LEVEL="INFO")
    assert run.returncode == 1
    shown = run.stdout + run.stderr
    assert "vToken cannot run with:\n" in shown, shown[-4000:]
    assert "  - worker_cls='vllm.v1.worker.cpu_worker.CPUWorker': set worker_cls='vtoken_torch." in shown
