"""Engine and workers in processes of their own: tensor parallelism, and what a refusal looks like from outside."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from vtoken.config import VTokenConfig
from vtoken.trace import VictimTrace
from vtoken_torch.vllm_plugin.options import request_config

ENGINE = VTokenConfig(policy="streaming_llm", kv_budget=64, interval=8, when="always")  # of vllm_processes.py
POLICIES = [
    {"vtoken_budget": 64},
    {"vtoken_policy": "random", "vtoken_budget": 50},
    {"vtoken_off": 1},
    {"vtoken_policy": "h2o", "vtoken_budget": 50},
    {"vtoken_policy": "tova", "vtoken_budget": 60},
]
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


@pytest.mark.slow
@pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="two ranks are bound to two CPU cores, here is one")
def test_two_tensor_parallel_ranks_carry_out_the_same_plans_and_stay_exact(tiny_llama, reference, tokens, tmp_path):
    from vllm_mass import assert_trace_chosen_by
    from vllm_reference import Epoch
    from vllm_world import Outcome, assert_outcome

    prompts, trace = [tokens(length) for length in (100, 140, 200, 90, 130)], tmp_path / "trace"
    program = Path(__file__).with_name("vllm_processes.py")
    run = _run(program, tiny_llama, trace, json.dumps(prompts), json.dumps(POLICIES))
    assert run.returncode == 0, run.stderr[-4000:]
    result = json.loads(run.stdout.splitlines()[-1])
    first, second = result["ranks"]
    assert first == second
    assert first[1] > 0, "no rank moved a token"
    assert first[2] > 0, "no rank recycled a slot"
    assert result["all_free"]
    events = VictimTrace.load(trace).events
    assert sorted(events) == [0, 1, 3, 4]
    for key, (prompt, said, logprobs) in enumerate(zip(prompts, result["said"], result["logprobs"], strict=True)):
        deaths = [death for event in events.get(key, ()) for death in zip(event.died, event.chosen, strict=True)]
        assert_outcome(reference, Outcome(prompt, said, logprobs, [Epoch(deaths)]), f"request {key}")
        if key >= 3:  # each rank sees half of the heads' attention, and their sum decides
            config = request_config(POLICIES[key], ENGINE)
            assert_trace_chosen_by(reference, events[key], prompt + said, len(prompt), config)


@pytest.mark.slow
def test_a_refusal_in_the_engines_process_reaches_the_users_terminal(tiny_llama, tmp_path):
    program = tmp_path / "refused.py"
    program.write_text(REFUSED)
    run = _run(program, tiny_llama, VLLM_ENABLE_V1_MULTIPROCESSING="1", VLLM_LOGGING_LEVEL="INFO")
    assert run.returncode == 1
    shown = run.stdout + run.stderr
    assert "vToken cannot run with:\n" in shown, shown[-4000:]
    assert "  - worker_cls='vllm.v1.worker.cpu_worker.CPUWorker': set worker_cls='vtoken_torch." in shown
