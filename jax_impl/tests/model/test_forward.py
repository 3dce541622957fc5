from dataclasses import replace

import numpy as np
import pytest
from jax_dense_llama import DenseLlama

from vtoken.policies import MassNeed
from vtoken.serving.protocol import SamplingParams
from vtoken_jax.aot.models import MODELS
from vtoken_jax.model.abstract import trace_step
from vtoken_jax.model.config import ModelConfig
from vtoken_jax.runner import JaxRunner

FAMILIES = ["llama", "mistral", "qwen2"]
PROMPT = [7, 3, 91, 14, 15, 92, 65, 35, 89, 79, 32, 38, 46, 26, 43, 38, 33, 27, 95, 2]


def hf_greedy(model, prompt, count):
    import torch

    ids = torch.tensor([prompt])
    for _ in range(count):
        ids = torch.cat([ids, model(ids).logits[:, -1:].argmax(-1)], dim=1)
    return ids[0, len(prompt) :].tolist()


@pytest.mark.parametrize("family", FAMILIES)
def test_the_oracle_of_other_tests_is_hugging_face_s_model(hf_models, family) -> None:
    import torch

    model, folder = hf_models(family)
    model.set_attn_implementation("eager")
    theirs = model(torch.tensor([PROMPT]), output_attentions=True)

    logits, attention = DenseLlama(folder)(PROMPT)

    np.testing.assert_allclose(logits, theirs.logits[0].detach(), rtol=0, atol=1e-4)
    np.testing.assert_allclose(attention, torch.stack(theirs.attentions)[:, 0].detach(), rtol=0, atol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_tokens_are_hugging_face_s_over_two_chunks(hf_models, make_driver, family) -> None:
    model, folder = hf_models(family)
    driver = make_driver(JaxRunner.from_folder(folder, "float32"), num_blocks=40)

    expected = hf_greedy(model, PROMPT, 12)

    assert len(set(expected)) > 3
    assert driver.greedy("a", PROMPT, 12, chunk=16) == expected


def test_chunks_and_decodes_of_one_step_do_not_mix(model_folders, dense_llama, make_driver) -> None:
    driver = make_driver(JaxRunner.from_folder(model_folders("llama"), "float32"), num_blocks=40)
    first = driver.greedy("a", PROMPT[:9], 3)
    second = driver.greedy("b", PROMPT[2:], 2)
    driver.admit("c")
    driver.step(("a", first[-1:]), ("c", PROMPT[:5]))

    params = SamplingParams()
    rows = [driver.row("c", PROMPT[5:16], params), driver.row("b", second[-1:], params)]
    tokens = driver.runner.step(rows)

    assert tokens == [dense_llama.greedy(PROMPT[:16], 1)[0], dense_llama.greedy(PROMPT[2:], 3)[-1]]
    table = driver.table_view("a")
    assert table.num_computed_tokens == 9 + 3
    assert driver.observe().requests["c"].positions == tuple(range(16))


def test_steps_of_a_known_shape_are_not_compiled_again_not_even_by_another_engine(
    model_folders, make_driver, num_compiles
) -> None:
    folder = model_folders("llama")

    def run(prompt, count):
        driver = make_driver(JaxRunner.from_folder(folder, "float32"), num_blocks=40)
        return driver.greedy("a", prompt, count, chunk=16)

    first, before = run(PROMPT, 12), num_compiles()
    second = run([*PROMPT[::-1], 5, 6, 7], 15)
    assert num_compiles() == before
    assert first != second[:12]


def test_each_step_that_is_compiled_is_told_once(model_folders, make_driver, num_compiles, caplog) -> None:
    runner, before = JaxRunner.from_folder(model_folders("mistral"), "float32"), num_compiles("run_step")
    with caplog.at_level("INFO", "vtoken_jax"):
        driver = make_driver(runner, num_blocks=12, block_size=8)
        driver.greedy("a", PROMPT, 5)
        for top_k in (3, 4):
            driver.step(("a", [top_k]), sampling=SamplingParams(temperature=1.0, top_k=top_k))
        driver = make_driver(runner, MassNeed(window=4, decay=0.5), num_blocks=12, block_size=8)
        driver.greedy("a", PROMPT[:1], 2)
    lines = [record.getMessage() for record in caplog.records]
    assert lines == [
        "compiling a step: 1 x 32 tokens over 88 slots, greedy, no mass",
        "compiling a step: 2 x 1 tokens over 88 slots, greedy, no mass",
        "compiling a step: 2 x 1 tokens over 88 slots, drawn of the top 4, no mass",
        "compiling a step: 2 x 1 tokens over 88 slots, greedy, mass of window 4, decay 0.5",
    ]
    assert num_compiles("run_step") - before == len(lines)


def test_a_growing_request_compiles_one_step_for_each_width_and_a_second_one_none(
    model_folders, make_driver, num_compiles, caplog
) -> None:
    runner, prompt = JaxRunner.from_folder(model_folders("qwen2"), "float32"), PROMPT * 15
    with caplog.at_level("INFO", "vtoken_jax"):
        driver = make_driver(runner, num_blocks=80, block_size=16)
        driver.greedy("a", prompt, 25)
        before = num_compiles()
        driver.greedy("b", prompt[-7::-1], 31)
    assert num_compiles() == before
    assert [record.getMessage() for record in caplog.records] == [
        "compiling a step: 1 x 512 tokens over 384 slots, greedy, no mass",
        *(f"compiling a step: 2 x 1 tokens over {width} slots, greedy, no mass" for width in (320, 384)),
    ]


PAPER_MODELS = {
    "Llama-3.1-8B": {
        "model_type": "llama",
        "vocab_size": 128256,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    },
    "Mistral-7B-v0.3": {
        "model_type": "mistral",
        "vocab_size": 32768,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1000000.0,
        "sliding_window": None,
    },
    "Qwen2.5-7B": {
        "model_type": "qwen2",
        "vocab_size": 152064,
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "max_position_embeddings": 131072,
        "rope_theta": 1000000.0,
        "sliding_window": 131072,
        "use_sliding_window": False,
    },
}


@pytest.mark.parametrize("name", PAPER_MODELS)
def test_a_step_of_the_paper_s_models_is_lowered_without_their_weights(name) -> None:
    config = ModelConfig.from_mapping(PAPER_MODELS[name])
    assert replace(MODELS[name], max_positions=config.max_positions) == config  # that is what make aot compiles
    traced = trace_step(config, "bfloat16", ((8, 1), (1, 512)), num_blocks=4096, width_blocks=128)

    cache, masses, tokens = traced.out_info
    assert masses is None
    assert tokens.shape == (9,)
    assert {plane.shape for plane in cache.k} == {(4096 * 16, config.num_kv_heads * config.head_size)}
    assert {plane.dtype for plane in cache.k} == {np.dtype(np.uint16)}
    assert traced.lower().as_text().count("tf.aliasing_output") == 2 * config.num_layers + 1
