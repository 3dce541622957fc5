"""A tiny Llama for the tests that run a model, and a made-up recording for those that need none."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from vtoken_bench.demo.recording import KEPT_ROWS, Recording, Step

NUM_QUERY_HEADS = 4


@pytest.fixture(scope="session")
def tiny_llama() -> Any:
    """Two layers, four query heads, two KV heads of 8, random weights, float32."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    torch.set_num_threads(1)
    torch.manual_seed(7)
    config = transformers.LlamaConfig(
        vocab_size=256,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=NUM_QUERY_HEADS,
        num_key_value_heads=2,
        max_position_embeddings=256,
        bos_token_id=None,
        eos_token_id=None,
        initializer_range=0.5,  # small weights would make every attention uniform, and every token the same
    )
    return transformers.LlamaForCausalLM(config).eval()


@pytest.fixture(scope="session")
def tiny_folder(tiny_llama: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny Llama as a model folder; its tokens are bytes."""
    tokenizers = pytest.importorskip("tokenizers")
    transformers = pytest.importorskip("transformers")
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    byte_level = tokenizers.Tokenizer(tokenizers.models.BPE({char: i for i, char in enumerate(alphabet)}, []))
    byte_level.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    byte_level.decoder = tokenizers.decoders.ByteLevel()
    folder = tmp_path_factory.mktemp("models") / "tiny-llama"
    tiny_llama.save_pretrained(folder)
    transformers.PreTrainedTokenizerFast(tokenizer_object=byte_level).save_pretrained(folder)
    return folder


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
