"""The JAX engine on SmolLM2-135M beside transformers."""

from collections.abc import Callable

import pytest

from vtoken.serving.protocol import SamplingParams
from vtoken_bench.models import load_model, smollm2_folder

_PROMPT = "The capital of France is"


@pytest.mark.slow
def test_greedy_tokens_are_those_of_transformers(need_smollm2: Callable[..., None]) -> None:
    need_smollm2("jax", "flax", "orbax")
    import torch

    from vtoken_jax.engine import JaxEngine

    engine = JaxEngine(smollm2_folder(), max_num_seqs=1, max_model_len=128)
    (output,) = engine.generate(_PROMPT, SamplingParams(max_tokens=64))
    assert len(output.token_ids) == 64

    tokens = torch.tensor([[*output.prompt_token_ids, *output.token_ids]])
    with torch.inference_mode():  # each token is the likeliest after those before it: greedy decoding, in one pass
        logits = load_model().model(tokens).logits[0]
    assert logits[len(output.prompt_token_ids) - 1 : -1].argmax(-1).tolist() == list(output.token_ids)
    assert "Paris" in output.text
