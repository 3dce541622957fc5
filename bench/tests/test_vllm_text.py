"""Real text in the real engine: SmolLM2 goes on telling while its cache is held at a fixed size."""

from collections.abc import Callable
from pathlib import Path

import pytest

from vtoken.trace import VictimTrace

BUDGET, LENGTH = 63, 120
PROMPT = "The old lighthouse keeper climbed the stairs every evening. He lit the lamp and looked out at the sea."


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_smollm2_says_what_transformers_says_under_the_same_mask(
    need_smollm2: Callable[..., None], tmp_path: Path
) -> None:
    need_smollm2("vllm")
    import torch

    from vtoken_bench.models import load_model, smollm2_folder
    from vtoken_bench.vllm_engine import VllmEngine

    reference = load_model(smollm2_folder())
    prompt = reference.tokenizer(PROMPT)["input_ids"]
    settings = {
        "policy": "streaming_llm",
        "kv_budget": BUDGET,
        "interval": 8,
        "when": "always",
        "record_trace": str(tmp_path / "trace"),
    }
    with VllmEngine(smollm2_folder(), settings, block_size=32, num_blocks=33, max_model_len=512) as engine:
        engine.submit(prompt, LENGTH)
        while engine.engine.has_unfinished_requests():
            for output in engine.engine.step():
                said = list(output.outputs[0].token_ids)
    (events,) = VictimTrace.load(tmp_path / "trace").events.values()

    tokens = [*prompt, *said]
    visible = torch.ones(len(tokens), len(tokens), dtype=torch.bool).tril()
    for event in events:
        for count, victim in zip(event.died, event.chosen, strict=True):
            visible[count:, victim] = False
    assert int(visible[-1].sum()) <= BUDGET + 8
    mask = torch.where(visible, 0.0, torch.finfo(torch.float32).min)[None, None]
    with torch.inference_mode():
        logits = reference.model(input_ids=torch.tensor([tokens]), attention_mask=mask, use_cache=False).logits[0]
    assert logits[len(prompt) - 1 : -1].argmax(-1).tolist() == said
    text = reference.tokenizer.decode(said)
    words = [word.strip(".,!?\"'").lower() for word in text.split()]
    assert len(set(words)) > 20, text  # sentences, not noise and not one word over and over
    assert {"he", "lamp", "sea"} <= set(words), text  # what the prompt was about, which is evicted by then
