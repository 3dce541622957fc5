"""The demo as a user runs it, with a short prompt: SmolLM2-135M, three executors."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from vtoken.cli import main


@pytest.mark.slow
def test_a_real_models_kv_is_the_same_bytes_in_all_executors_and_variants(
    need_smollm2: Callable[..., None], tmp_path: Path
) -> None:
    need_smollm2("jax")
    assert main(["demo", "--no-serving", "--prompt-tokens", "256", "--tokens", "32", "--out", str(tmp_path)]) == 0
    record = json.loads((tmp_path / "report.json").read_text())

    assert record["model"]["name"] == "SmolLM2-135M-Instruct"
    assert record["model"]["kv_bytes_per_token"] == 30 * 2 * 3 * 64 * 4
    assert record["summary"]["same_bytes"] is True
    assert record["summary"]["num_replays"] == 30
    assert record["summary"]["native_blocks"] == 18
    for policy, saved in record["summary"]["saved_blocks"].items():
        assert saved["eager"] == 8, policy  # 144 of 288 tokens stay, and up to an interval more
        assert saved["eager"] >= max(saved["naive"], saved["lazy"]) >= 0
    words = record["run"]["continuation"].split()
    assert len(set(words)) > 5  # it reads like text, not like noise or one word over and over
    assert record["run"]["continuation"].isprintable() or "\n" in record["run"]["continuation"]
