from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from vtoken.errors import InvariantError, SpecError  # noqa: E402
from vtoken_bench.demo.record_run import record_run  # noqa: E402
from vtoken_bench.demo.recording import KEPT_ROWS, Recording  # noqa: E402

PROMPT = [(37 * i + 11) % 256 for i in range(90)]
NUM_TOKENS = 24
CHUNK = 40  # longer than KEPT_ROWS, and no divisor of the prompt


@pytest.fixture(scope="module")
def recording(tiny_llama: Any) -> Recording:
    return record_run(tiny_llama, PROMPT, NUM_TOKENS, CHUNK)


@pytest.fixture(scope="module")
def plain(tiny_llama: Any, recording: Recording) -> Any:
    """The same tokens through transformers' own eager attention, in one forward."""
    tiny_llama.set_attn_implementation("eager")
    with torch.inference_mode():
        return tiny_llama(torch.tensor([recording.token_ids]), output_attentions=True, use_cache=True)


def test_greedy_tokens_are_those_of_plain_transformers(tiny_llama: Any, recording: Recording) -> None:
    tiny_llama.set_attn_implementation("eager")
    ids = torch.tensor([PROMPT])
    out = tiny_llama.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=NUM_TOKENS)

    assert list(recording.token_ids) == out[0].tolist()
    assert len(set(recording.token_ids[len(PROMPT) :])) > 2  # a run that says something


def test_the_steps_are_chunks_and_then_single_tokens(recording: Recording) -> None:
    sizes = [(step.num_tokens, step.is_chunk) for step in recording.steps]

    assert sizes == [(40, True), (40, True), (10, True)] + [(1, False)] * NUM_TOKENS
    assert [step.start for step in recording.steps[1:]] == [step.end for step in recording.steps[:-1]]
    assert recording.num_tokens == len(PROMPT) + NUM_TOKENS


def test_mass_is_what_output_attentions_sums_to(recording: Recording, plain: Any) -> None:
    rows = torch.stack([layer[0].sum(0) for layer in plain.attentions]).mean(0).numpy()  # [query, key]

    for step in recording.steps:
        expected = rows[step.start : step.end, : step.end]
        np.testing.assert_allclose(step.mass, expected.sum(0), rtol=1e-5, atol=1e-5)
        assert len(step.last_rows) == min(step.num_tokens, KEPT_ROWS)
        np.testing.assert_allclose(step.last_rows, expected[-KEPT_ROWS:], rtol=1e-5, atol=1e-6)


def test_the_mass_of_a_query_is_its_number_of_heads(recording: Recording) -> None:
    for step in recording.steps:
        np.testing.assert_allclose(step.mass.sum(), step.num_tokens * 4, rtol=1e-5)


def test_kv_is_the_models_cache_in_canonical_order(recording: Recording, plain: Any) -> None:
    assert recording.kv.shape == (len(PROMPT) + NUM_TOKENS, 2, 2, 2, 8)
    for layer, cached in enumerate(plain.past_key_values.layers):
        for part, tensor in enumerate((cached.keys, cached.values)):
            expected = tensor[0].transpose(0, 1).numpy()
            np.testing.assert_allclose(recording.kv[:, layer, part], expected, rtol=1e-4, atol=1e-5)


def test_end_of_text_is_never_chosen(tiny_llama: Any, recording: Recording) -> None:
    favourite = recording.token_ids[len(PROMPT)]
    before = tiny_llama.generation_config.eos_token_id
    tiny_llama.generation_config.eos_token_id = [favourite]
    try:
        longer = record_run(tiny_llama, PROMPT, 5, CHUNK)
    finally:
        tiny_llama.generation_config.eos_token_id = before

    assert len(longer.token_ids) == len(PROMPT) + 5
    assert favourite not in longer.token_ids[len(PROMPT) :]


def test_the_model_keeps_its_own_attention_afterwards(tiny_llama: Any) -> None:
    tiny_llama.set_attn_implementation("sdpa")
    record_run(tiny_llama, PROMPT[:4], 1)

    assert tiny_llama.config._attn_implementation == "sdpa"


def test_a_model_that_does_not_call_the_recording_attention_is_found_out(
    tiny_llama: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny_llama.set_attn_implementation("eager")
    monkeypatch.setattr(type(tiny_llama), "set_attn_implementation", lambda self, name: None)

    with pytest.raises(InvariantError, match="no mass was collected"):
        record_run(tiny_llama, PROMPT[:4], 1)


@pytest.mark.parametrize(("prompt", "num_tokens", "chunk"), [([], 1, 1), ([1], 0, 1), ([1], 1, 0)])
def test_an_empty_run_is_refused(tiny_llama: Any, prompt: list[int], num_tokens: int, chunk: int) -> None:
    with pytest.raises(SpecError, match="at least 1"):
        record_run(tiny_llama, prompt, num_tokens, chunk)
