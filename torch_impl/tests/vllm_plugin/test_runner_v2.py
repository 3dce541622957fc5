"""Model runner V2: ``v2_program.py`` runs once, here stands what it must report."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).with_name("v2_program.py")


@pytest.fixture(scope="module")
def report(tiny_llama):
    found = subprocess.run(
        [sys.executable, str(PROGRAM), tiny_llama], capture_output=True, text=True, env={**os.environ}
    )
    assert found.returncode == 0, found.stderr[-4000:]
    return json.loads(found.stdout.splitlines()[-1])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "met"),
    [
        ("addresses", ("moves", "recycled")),
        ("chunked", ("moves", "recycled")),
        ("preempted", ("preemptions", "aborts", "recycled")),
        ("asynchronous", ("preemptions in flight", "aborts in flight", "recycled")),
        ("cached", ("cached", "moves", "recycled")),
        ("mass", ("choices", "sampled choices", "moves", "recycled")),
        ("lazy", ("choices", "moves", "evicted", "cached", "aborts")),
        ("fuzz", ("evicted", "moves", "aborts", "victims by mass")),
    ],
)
def test_v2_is_exact(report, case, met):
    done = report[case]
    assert "error" not in done, done["error"]
    assert done["runner"] == "EvictingRunnerV2"
    assert all(done[event] > 0 for event in met), done


@pytest.mark.slow
def test_v2_gives_attention_the_same_addresses_in_200_steps(report):
    done = report["addresses"]
    assert done["addresses"] == {"block_table_tensor": 1, "seq_lens": 1, "slot_mapping": 1}
    assert done["steps"] > 200


@pytest.mark.slow
@pytest.mark.parametrize("name", ["_count_live", "_aim_at_recycled", "with_live_lengths"])
def test_v2_without_one_override_says_something_else(report, name):
    assert "other tokens" in report["mutants"][name] or "logprobs differ" in report["mutants"][name]


@pytest.mark.slow
def test_v2_lengths_in_a_fresh_tensor_are_noticed(report):
    assert report["mutants"]["addresses"]["seq_lens"] > 1
