import json

import pytest

from vtoken.errors import SpecError
from vtoken_jax.model.config import ModelConfig, RopeScaling, read_eos_token_ids

LLAMA = {
    "model_type": "llama",
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def test_what_a_file_leaves_out_has_the_family_s_default() -> None:
    config = ModelConfig.from_mapping(LLAMA)
    assert (config.num_kv_heads, config.head_size, config.rope_theta, config.rope_scaling) == (4, 16, 10000.0, None)
    assert not any((config.qkv_bias, config.output_bias, config.mlp_bias, config.tied_embeddings))


def test_both_spellings_of_the_rotary_parameters_mean_the_same() -> None:
    old = LLAMA | {"rope_theta": 5e5, "rope_scaling": LLAMA3_ROPE}
    new = LLAMA | {"rope_parameters": LLAMA3_ROPE | {"rope_theta": 5e5}}
    assert ModelConfig.from_mapping(old) == ModelConfig.from_mapping(new)
    assert ModelConfig.from_mapping(old).rope_scaling == RopeScaling("llama3", 8.0, 1.0, 4.0, 64)


def test_each_family_has_its_biases() -> None:
    def biases(**changes: object) -> tuple[bool, bool, bool]:
        config = ModelConfig.from_mapping(LLAMA | changes)
        return config.qkv_bias, config.output_bias, config.mlp_bias

    assert biases(model_type="qwen2") == (True, False, False)
    assert biases(model_type="mistral", sliding_window=None) == (False, False, False)
    assert biases(attention_bias=True) == (True, True, False)
    assert biases(mlp_bias=True) == (False, False, True)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "gpt2"}, "'gpt2' is not computed here: take one of llama, mistral, qwen2"),
        ({"model_type": "mistral", "sliding_window": 4096}, "sliding_window=4096: .*take a model without"),
        ({"model_type": "qwen2", "sliding_window": 64, "use_sliding_window": True}, "take a model without"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "take a model without"),
        ({"quantization_config": {"bits": 4}}, "save the model in float32 or bfloat16"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu'.*take another model"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "'yarn' is not computed here: take one of default"),
        ({"rope_scaling": {"rope_type": "llama3"}}, "no configuration of a Llama-family model: KeyError"),
        ({"hidden_size": "wide"}, "no configuration of a Llama-family model"),
    ],
)
def test_what_is_not_computed_is_refused_with_a_remedy(changes: dict[str, object], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        ModelConfig.from_mapping(LLAMA | changes)


def test_qwen2_names_a_window_that_it_does_not_use() -> None:
    config = LLAMA | {"model_type": "qwen2", "sliding_window": 4096, "use_sliding_window": False}
    assert ModelConfig.from_mapping(config).family == "qwen2"


def test_a_folder_without_a_readable_file_is_refused_by_name(tmp_path) -> None:
    with pytest.raises(
        SpecError, match=f"{tmp_path} is no model folder: it has no config.json: give one that save_pretrained"
    ):
        ModelConfig.from_folder(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(SpecError, match=r"config\.json is no JSON: .*: mend it, or save the model again"):
        ModelConfig.from_folder(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": 3}))
    with pytest.raises(SpecError, match=r"config.json: no configuration .*model_type"):
        ModelConfig.from_folder(tmp_path)


def test_a_pool_of_another_model_is_refused() -> None:
    config = ModelConfig.from_mapping(LLAMA)
    spec = config.kv_spec(dtype="float32", block_size=16, num_blocks=8, max_num_reqs=2)
    config.check_spec(spec)
    other = ModelConfig.from_mapping(LLAMA | {"num_hidden_layers": 3})
    with pytest.raises(SpecError, match="the pool has num_layers=2, the model 3"):
        other.check_spec(spec)


@pytest.mark.parametrize(
    ("config", "generation", "ids"),
    [
        ({"eos_token_id": 5}, None, (5,)),
        ({"eos_token_id": [5, 6]}, None, (5, 6)),
        ({"eos_token_id": None}, None, ()),
        ({}, None, ()),
        ({"eos_token_id": 5}, {"eos_token_id": [7, 5]}, (7, 5)),
        ({"eos_token_id": 5}, {"eos_token_id": 7}, (7,)),
        ({"eos_token_id": 5}, {"eos_token_id": None}, ()),
        ({"eos_token_id": 5}, {}, ()),
    ],
)
def test_the_tokens_that_end_a_text_are_read(tmp_path, config, generation, ids) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    if generation is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    assert read_eos_token_ids(tmp_path) == ids


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"eos_token_id": "</s>"}', r"eos_token_id=\['</s>'\]: give a token id, a list of them, or null"),
        ("[2]", "is no JSON object: mend it, or save the model again"),
        ("{", "is no JSON: .*: mend it, or save the model again"),
    ],
)
def test_tokens_that_end_a_text_and_do_not_read_are_refused(tmp_path, text, message) -> None:
    (tmp_path / "config.json").write_text('{"eos_token_id": 5}')
    (tmp_path / "generation_config.json").write_text(text)
    with pytest.raises(SpecError, match=rf"generation_config\.json:? ?.*{message}"):
        read_eos_token_ids(tmp_path)
