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

_TEXTS = ["The capital of France is", "Once upon a time there was a small robot who lived in a lighthouse and"]
_ALWAYS = {"kv_budget": 12, "interval": 2, "when": "always"}
_SETTINGS: list[dict[str, Any]] = [
    {"policy": "none"},
    {"policy": "h2o", **_ALWAYS},
    {"policy": "random", **_ALWAYS, "variant": "naive"},
    {"policy": "streaming_llm", **_ALWAYS, "mode": "lazy", "low_watermark": 1.0, "cooldown_steps": 1},
]


@pytest.mark.slow
def test_greedy_tokens_are_those_of_a_masked_run(need_smollm2: Callable[..., None]) -> None:
    need_smollm2()
    import torch

    from vtoken_torch.engine import TorchEngine

    sys.path.append(str(Path(__file__).parents[2] / "torch_impl" / "tests" / "hf"))
    from hf_reference import replay

    torch.set_num_threads(1)
    loaded = load_model()
    for settings in _SETTINGS:
        steps: dict[int, list[tuple[int, int]]] = defaultdict(list)

        def note(report: StepReport, steps: dict[int, list[tuple[int, int]]] = steps) -> None:
            for index, row in report.rows:
                steps[index].append((row.start, row.start + len(row.token_ids)))

        sizes = {"block_size": 4, "max_model_len": 64, "chunk_tokens": 8}
        engine = TorchEngine(loaded.model, tokenizer=loaded.tokenizer, on_step=note, **sizes, **settings)
        outputs = engine.generate(_TEXTS, SamplingParams(max_tokens=8), progress=False)
        engine.release()
        if settings["policy"] == "none":
            assert outputs[0].text.startswith(" Paris")
        else:
            assert engine.counters.num_evicted_tokens > 0

        loaded.model.set_attn_implementation("eager")
        for output in outputs:
            tokens, mine = [*output.prompt_token_ids, *output.token_ids], steps[output.index]
            is_sampled = [end >= len(output.prompt_token_ids) for _, end in mine]
            masked = replay(loaded.model, tokens, mine, engine.trace.events.get(output.index, []), is_sampled)
            assert masked.tokens == list(output.token_ids), settings
