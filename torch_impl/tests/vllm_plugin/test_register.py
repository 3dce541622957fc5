"""Native stays native; and once enabled, bad request settings are refused where the request is made."""

import subprocess
import sys

import pytest

_INERT = """
import sys
from importlib.metadata import entry_points
(point,) = entry_points(group="vllm.general_plugins", name="vtoken")
register = point.load()
register(); register()
assert "torch" not in sys.modules and "vllm" not in sys.modules, "register imported an engine"
from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager
from vllm.v1.kv_cache_spec_registry import _REGISTRY_KVCACHESPEC_LIST
from vllm.plugins import load_general_plugins
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.input_processor import InputProcessor
owners = (SamplingParams, Scheduler, FullAttentionManager, AsyncLLM, InputProcessor)
before = [dict(vars(owner)) for owner in owners]
load_general_plugins(); register()
assert [dict(vars(owner)) for owner in owners] == before, "a class was patched"
assert not any(name.startswith("vtoken_torch.vllm_plugin.") for name in sys.modules)
assert not any(spec.__module__.startswith("vtoken") for spec in _REGISTRY_KVCACHESPEC_LIST)
SamplingParams(extra_args={"vtoken_budget": "nonsense"})
"""

SETTINGS = {"policy": "random", "kv_budget": 60, "interval": 8, "when": "always"}


def _run(program, *arguments):
    command = [sys.executable, program, *arguments]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert result.returncode == 0, result.stderr[-2000:]
    return result.stdout


def test_not_enabled_the_plugin_changes_nothing(monkeypatch, tmp_path):
    monkeypatch.setenv("VTOKEN_VLLM", "0")
    program = tmp_path / "inert.py"
    program.write_text(_INERT)
    _run(program)


def test_settings_that_no_class_would_read_are_refused_at_start(world):
    from vtoken_torch.vllm_plugin.validation import check_requests

    check_requests()
    with pytest.raises(ValueError, match=r"nothing reads it: set scheduler_cls='vtoken_torch.* and worker_cls="):
        world(None, additional_config={"vtoken": SETTINGS})


def test_a_bad_request_is_a_value_error_and_the_engine_lives_on(world, reference, tokens):
    with world({"policy": "streaming_llm", "kv_budget": 64, "when": "always"}) as engine:
        with pytest.raises(ValueError, match=r"vtoken_budget=-3: give a whole number of tokens of at least 2"):
            engine.submit(tokens(40), 10, vtoken_budget=-3)
        with pytest.raises(ValueError, match="did you mean 'vtoken_budget'"):
            engine.submit(tokens(40), 10, vtoken_budged=3)
        engine.outcomes.clear()
        engine.submit(tokens(90), 20)
        engine.run()
        engine.assert_exact(reference)


def test_settings_that_slip_through_turn_eviction_off_for_their_request_alone(world, reference, tokens, monkeypatch):
    from vllm import SamplingParams

    from vtoken_torch.vllm_plugin.capacity import Capacity

    with world({"policy": "streaming_llm", "kv_budget": 40, "when": "always", "interval": 8}) as engine:
        monkeypatch.setattr(SamplingParams, "_verify_extra_args", lambda self: None)
        monkeypatch.setattr(Capacity, "check", lambda self, *args: None)
        engine.submit(tokens(90), 20, vtoken_budget="nonsense")
        engine.submit(tokens(90), 20)
        engine.run()
        engine.assert_exact(reference)
        assert not engine.outcomes[0].epochs[0].deaths
        assert engine.outcomes[1].epochs[0].deaths


def test_a_policy_that_raises_costs_its_request_the_eviction_and_nothing_else(world, reference, tokens, monkeypatch):
    from vtoken.policies.random import RandomPolicy

    with world({"policy": "streaming_llm", "kv_budget": 40, "when": "always", "interval": 8}) as engine:
        monkeypatch.setattr(RandomPolicy, "select_victims", lambda self, view: 1 / 0)
        engine.submit(tokens(90), 20, vtoken_policy="random")
        engine.submit(tokens(90), 20)
        engine.run()
        engine.assert_exact(reference)
        assert not engine.outcomes[0].epochs[0].deaths
        assert engine.outcomes[1].epochs[0].deaths
        engine.assert_nothing_left()
