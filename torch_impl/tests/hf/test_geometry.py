from typing import Any

import pytest
import torch
from hf_world import build, family, tiny_model
from transformers import AutoConfig

from vtoken.errors import SpecError
from vtoken_torch.hf.geometry import check_config, probe
from vtoken_torch.hf.runner import HFRunner

REFUSED = [
    ("mistral", {"sliding_window": 64}, "sliding window of 64 .*sliding_window=None"),
    ("qwen2", {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 0}, "sliding window of 64"),
    ("gemma3_text", {}, "sliding window"),
    ("llama4_text", {}, "chunked_attention"),
    ("deepseek_v3", {}, "MLA"),
    ("falcon", {"alibi": True}, "ALiBi"),
    ("bloom", {}, "ALiBi"),
    ("t5", {}, "encoder"),
    (
        "llama",
        {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}},
        "RoPE of type 'dynamic'",
    ),
    ("qwen3_next", {}, "linear_attention"),
]


@pytest.mark.parametrize(("name", "changes", "says"), REFUSED, ids=[name for name, *_ in REFUSED])
def test_models_whose_geometry_depends_on_the_index_are_refused_by_name(
    name: str, changes: dict[str, Any], says: str
) -> None:
    with pytest.raises(SpecError, match=f"model type '{name}': .*{says}"):
        check_config(AutoConfig.for_model(name, **changes))


@pytest.mark.parametrize("name", ["mamba", "falcon_h1", "gptj", "mpt"])
def test_models_without_plain_attention_layers_are_refused_when_they_run(name: str) -> None:
    shapes: dict[str, dict[str, Any]] = {
        "mamba": {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 4},
        "falcon_h1": {
            "vocab_size": 64,
            "hidden_size": 32,
            "intermediate_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "mamba_d_ssm": 32,
            "mamba_n_heads": 4,
            "mamba_d_head": 8,
            "mamba_d_state": 4,
        },
        "gptj": {"vocab_size": 64, "n_embd": 32, "n_layer": 2, "n_head": 4, "rotary_dim": 4},
        "mpt": {"vocab_size": 64, "d_model": 32, "n_layers": 2, "n_heads": 4},
    }
    model = build(AutoConfig.for_model(name, **shapes[name]))
    before = model.config._attn_implementation
    with pytest.raises(SpecError, match=f"model type '{name}': .*take a model"):
        probe(model)
    assert model.config._attn_implementation == before


def test_a_softcap_is_seen_when_the_model_runs() -> None:
    config = AutoConfig.for_model(
        "gemma2",
        vocab_size=64,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        sliding_window=None,
        layer_types=["full_attention"] * 2,
    )
    with pytest.raises(SpecError, match="caps its logits"):
        probe(build(config))


def test_the_shape_is_read_from_the_running_model() -> None:
    geometry = probe(build(family("llama", head_dim=24, num_attention_heads=8, num_key_value_heads=2)))
    shape = geometry.num_layers, geometry.num_kv_heads, geometry.num_query_heads, geometry.head_size
    assert shape == (2, 2, 8, 24)
    assert geometry.dtype == "float32"
    assert geometry.max_positions == 512


def test_a_pool_of_another_shape_is_refused() -> None:
    runner = HFRunner(tiny_model("llama"))
    spec = probe(build(family("llama", head_dim=24))).kv_spec(block_size=4, num_blocks=8, max_num_reqs=2)
    with pytest.raises(SpecError, match="head_size=24: the model has 16"):
        runner.make_store(spec)


def test_other_floats_are_refused() -> None:
    model = build(family("llama")).double()
    with pytest.raises(SpecError, match=r"torch\.float64: load it with dtype"):
        probe(model)


def test_outside_the_engine_the_model_says_what_to_do_and_release_gives_it_back() -> None:
    model = build(family("llama"))
    tokens = torch.tensor([[5, 6, 7]])
    want = model(tokens).logits
    runner = HFRunner(model)
    with pytest.raises(SpecError, match="set_attn_implementation"):
        model(tokens)
    runner.release()
    torch.testing.assert_close(model(tokens).logits, want)
