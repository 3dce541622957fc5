"""The PyTorch engine on SmolLM2-135M beside transformers' eager attention with masks made from the victim trace."""

import sys
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from vtoken.serving.engine import StepReport
from vtoken.serving.protocol import SamplingParams
from vtoken_bench.models import load_model

pytestmark = pytest.mark.slow

_TEXTS = ["The capital of France is", "Once upon a time there was a small robot who lived in a lighthouse and"]
_ALWAYS = {"kv_budget": 12, "interval": 2, "when": "always"}
_LAZY = {"mode": "lazy", "low_watermark": 1.0, "cooldown_steps": 1, "theta_fragmentation": 0.1}
_SETTINGS: dict[str, dict[str, Any]] = {
    "h2o, eager": {"policy": "h2o"},
    "tova, fill alone": {"policy": "tova", "recycle": False},
    "snapkv, fenced": {"policy": "snapkv", "regime": "fenced"},
    "scissorhands, lazy": {"policy": "scissorhands", **_LAZY},
    "random, naive": {"policy": "random", "variant": "naive"},
    "streaming_llm, lazy fenced": {"policy": "streaming_llm", **_LAZY, "regime": "fenced"},
    "sliding_window, eager": {"policy": "sliding_window"},
    "paged_eviction, whole pages": {"policy": "paged_eviction", "page_size": 4},
}
"""Every policy; every mode, planner, regime and variant among them."""


class Run:
    """An engine over the loaded model that notes its steps. ``check`` compares its tokens with transformers alone."""

    def __init__(self, model: Any, tokenizer: Any, **settings: Any) -> None:
        from vtoken_torch.engine import TorchEngine

        sizes = {"block_size": 4, "max_model_len": 64, "chunk_tokens": 8}
        self.model = model
        self.steps: dict[int, list[tuple[int, int]]] = defaultdict(list)
        self.engine = TorchEngine(model, tokenizer=tokenizer, on_step=self._note, **sizes, **settings)

    def replay(self, index: int, prompt: Any, output: Any, need: Any = None) -> Any:
        from hf_reference import replay

        self.model.set_attn_implementation("eager")
        steps, events = self.steps[index], self.engine.trace.events.get(index, [])
        is_sampled = [end >= len(prompt) for _, end in steps]
        return replay(self.model, [*prompt, *output], steps, events, is_sampled, need)

    def check(self, outputs: Any) -> None:
        for output in outputs:
            assert self.replay(output.index, output.prompt_token_ids, output.token_ids).tokens == [*output.token_ids]

    def _note(self, report: StepReport) -> None:
        for index, row in report.rows:
            self.steps[index].append((row.start, row.start + len(row.token_ids)))


@pytest.fixture(scope="module")
def run(need_smollm2: Callable[..., None]) -> Callable[..., Run]:
    need_smollm2()
    import torch

    sys.path.append(str(Path(__file__).parents[2] / "torch_impl" / "tests" / "hf"))
    torch.set_num_threads(1)
    loaded = load_model()
    return lambda **settings: Run(loaded.model, loaded.tokenizer, **settings)


def test_without_eviction_it_is_the_plain_model(run: Callable[..., Run]) -> None:
    plain = run(policy="none")
    outputs = plain.engine.generate(_TEXTS, SamplingParams(max_tokens=8), progress=False)
    assert outputs[0].text.startswith(" Paris")
    plain.check(outputs)


@pytest.mark.parametrize("name", _SETTINGS)
def test_greedy_tokens_are_those_of_a_masked_run(run: Callable[..., Run], name: str) -> None:
    evicting = run(**_ALWAYS | _SETTINGS[name])
    outputs = evicting.engine.generate(_TEXTS, SamplingParams(max_tokens=8), progress=False)
    assert evicting.engine.counters.num_evicted_tokens > 0
    evicting.check(outputs)


def test_mass_is_that_of_output_attentions(run: Callable[..., Run]) -> None:
    evicting = run(**_ALWAYS, policy="h2o")
    engine = evicting.engine
    request = engine.submit(engine.tokenizer.encode(_TEXTS[1]), SamplingParams(max_tokens=8))
    while len(request.output) < 6:
        engine.step()
    assert engine.counters.num_evicted_tokens > 0
    table = engine.loop.pool.tables[request.req_id]
    live = sorted(table.live_positions())
    mass, _ = engine.runner.scores(engine.loop.pool.row_of(request.req_id), live)
    need = engine.loop.scheduler.victims.policy.mass_need(engine.loop.config)
    recorder = evicting.replay(request.index, request.prompt, request.output, need).recorder
    assert list(mass) == pytest.approx(recorder.scores(live)[0], rel=1e-5, nan_ok=True)
