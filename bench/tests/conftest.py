"""A tiny Llama for the tests that run a model, SmolLM2, and a made-up recording and record for those that run none."""

from collections.abc import Callable
from importlib import metadata, util
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from vtoken_bench.demo.recording import KEPT_ROWS, Recording, Step
from vtoken_bench.models import PACKAGE
from vtoken_bench.pressure import Load, Outcome, setups
from vtoken_bench.pressure_report import make_record
from vtoken_bench.tiny_model import NUM_QUERY_HEADS, write_tiny_model
from vtoken_bench.tiny_model import tiny_llama as make_tiny_llama


@pytest.fixture(scope="session")
def tiny_llama() -> Any:
    """Two layers, four query heads, two KV heads of 8, random weights, float32."""
    torch = pytest.importorskip("torch")
    pytest.importorskip("transformers")
    torch.set_num_threads(1)
    return make_tiny_llama(head_size=8, max_positions=256)


@pytest.fixture(scope="session")
def tiny_folder(tiny_llama: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny Llama as a model folder; its tokens are bytes."""
    folder = tmp_path_factory.mktemp("models") / "tiny-llama"
    write_tiny_model(folder, tiny_llama)
    return folder


@pytest.fixture(scope="session")
def vllm_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with heads of 32, the least that vLLM's attention for CPUs takes."""
    pytest.importorskip("torch").set_num_threads(1)
    pytest.importorskip("transformers")
    folder = tmp_path_factory.mktemp("models") / "tiny-vllm-llama"
    write_tiny_model(folder, make_tiny_llama(max_positions=1024))
    return folder


@pytest.fixture(scope="session")
def need_smollm2() -> Callable[..., None]:
    """Skips the test unless SmolLM2-135M can be loaded, and these packages too; nothing is imported for it."""

    def need(*packages: str) -> None:
        needed = ("torch", "transformers", "gguf", "accelerate", *packages)
        missing = [name for name in needed if util.find_spec(name) is None]
        try:
            metadata.distribution(PACKAGE)
        except metadata.PackageNotFoundError:
            missing.append(PACKAGE)
        if missing:
            pytest.skip(f"not installed: {', '.join(missing)}")

    return need


@pytest.fixture
def pressure_record() -> dict[str, Any]:
    """Made up: two rounds of ``streaming_llm`` on a quick machine, so that the figures are wide."""
    steps = {"native": 2800, "naive": 2100, "vtoken": 1400}
    rounds = {
        setup: [_outcome(steps[setup.variant], seconds) for seconds in (1.0, 1.1)]
        for setup in setups(["streaming_llm"])
    }
    return make_record("tiny [bold]", Load(((1,) * 512,) * 16, 256, 32, 100, 512, 191, 16), rounds)


def _outcome(num_steps: int, seconds: float) -> Outcome:
    tokens_per_s = 5_000_000 / num_steps / seconds
    latency = {"p50": 100 * seconds, "p95": 150 * seconds, "p99": 160 * seconds}
    running = 10_000 / num_steps
    return Outcome(
        *(num_steps, running, round(running) + 1, 12, tokens_per_s, tokens_per_s / 2, latency),
        *(123_456, 45_678, 3_000, 0, ((1, 2),) * 16),
    )


@pytest.fixture(scope="session")
def make_recording() -> Callable[..., Recording]:
    """Random KV; ``attention(query, key)`` says what a query pays to a key before it is made to sum to the heads."""

    def make(
        prompt: int, chunk: int, decoded: int, attention: Callable[[int, int], float] = lambda query, key: 1.0
    ) -> Recording:
        ends = [*range(chunk, prompt, chunk), *range(prompt, prompt + decoded + 1)]
        starts = [0, *ends[:-1]]
        rng = np.random.default_rng(3)
        kv = rng.standard_normal((prompt + decoded, 2, 2, 2, 4), np.float32)
        steps = [_step(start, end, end <= prompt, attention) for start, end in zip(starts, ends, strict=True)]
        return Recording(tuple(range(prompt + decoded)), prompt, NUM_QUERY_HEADS, kv, tuple(steps))

    return make


def _step(start: int, end: int, is_chunk: bool, attention: Callable[[int, int], float]) -> Step:
    rows = np.zeros((end - start, end), np.float32)
    for query in range(start, end):
        rows[query - start, : query + 1] = [attention(query, key) for key in range(query + 1)]
    rows *= NUM_QUERY_HEADS / rows.sum(1, keepdims=True)
    return Step(start, end, is_chunk, rows.sum(0), rows[-KEPT_ROWS:])
