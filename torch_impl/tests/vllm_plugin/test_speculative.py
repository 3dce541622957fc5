"""Speculative decoding by n-grams: tables follow what is accepted, rejected drafts leave nothing behind."""

import json
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from vllm_plain_config import plain_config


@pytest.mark.slow
def test_ngram_drafts_stay_exact_under_eviction(tiny_llama):
    program = Path(__file__).with_name("vllm_speculation.py")
    run = subprocess.run([sys.executable, program, tiny_llama], capture_output=True, text=True, timeout=900)
    assert run.returncode == 0, run.stderr[-4000:]
    counts = json.loads(run.stdout.splitlines()[-1])
    print(counts)
    assert "refused drafts would count" in counts.pop("refused request")
    for event in ("accepted drafts", "rejected drafts", "evicted", "recycled", "moves", "preemptions", "aborts"):
        assert counts.get(event, 0) > 0, f"no {event}: {counts}"


@pytest.mark.parametrize(
    ("method", "is_async", "is_v2", "policy", "words"),
    [
        ("ngram", False, False, "random", None),
        ("eagle3", False, False, "random", r"method='eagle3'\), whose drafts are unproven"),
        ("ngram", True, False, "random", "under asynchronous scheduling"),
        ("ngram", False, True, "random", "on model runner V2"),
        ("ngram", False, False, "h2o", "policy='h2o' scores tokens by attention, where refused drafts would count"),
    ],
)
def test_what_is_refused_beside_drafts(method, is_async, is_v2, policy, words):
    from vtoken_torch.vllm_plugin.compat import config_refusals

    config = plain_config(
        speculative_config=SimpleNamespace(method=method),
        use_v2_model_runner=is_v2,
        scheduler_config__async_scheduling=is_async,
        additional_config={"vtoken": {"policy": policy, "kv_budget": 64}},
    )
    reasons = config_refusals(config)
    assert len(reasons) == (words is not None), reasons
    if words is not None:
        assert re.search(words, reasons[0])
