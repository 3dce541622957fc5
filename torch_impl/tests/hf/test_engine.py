import json
from collections.abc import Callable
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
from hf_world import World, build, family, prompt
from rich.console import Console

from vtoken.errors import SpecError
from vtoken.serving.protocol import SamplingParams
from vtoken_torch.engine import TorchEngine

QUICK = SamplingParams(max_tokens=4)


class Letters:
    """A tokenizer of one token a letter."""

    def encode(self, text: str) -> list[int]:
        return [ord(letter) for letter in text]

    def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
        return " ".join(map(str, ids))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp("model")
    build(family("llama")).save_pretrained(path)
    return path


def test_a_folder_is_loaded_in_the_dtype_asked_for_and_text_goes_in_and_out(folder: Path) -> None:
    engine = TorchEngine(folder, tokenizer=Letters(), max_model_len=64, dtype="bfloat16")
    assert engine.runner.geometry.dtype == "bfloat16"
    (output,) = engine.generate("hello", QUICK)
    assert output.prompt_token_ids == tuple(map(ord, "hello"))
    assert output.text == " ".join(map(str, output.token_ids))
    assert len(output.token_ids) == 4


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_runs_with_eviction_and_mass(dtype: torch.dtype) -> None:
    model = build(family("qwen2")).to(dtype)
    engine = TorchEngine(model, block_size=4, max_model_len=64, policy="h2o", kv_budget=8, interval=2, when="always")
    outputs = engine.generate([prompt(20), prompt(9, 1)], SamplingParams(max_tokens=8), progress=False)
    assert [len(output.token_ids) for output in outputs] == [8, 8]
    assert engine.counters.num_evicted_tokens > 0


def test_stream_gives_the_tokens_of_generate_as_they_come() -> None:
    prompts = [prompt(5), prompt(21, 1)]
    whole = World().engine.generate(prompts, QUICK, progress=False)
    parts: dict[int, list[int]] = {0: [], 1: []}
    for index, token in World().engine.stream(prompts, QUICK):
        parts[index].append(token)
    assert [tuple(parts[index]) for index in parts] == [output.token_ids for output in whole]


def test_progress_is_shown_to_the_end_when_it_is_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = StringIO()
    monkeypatch.setattr("vtoken_torch.engine.Console", lambda **_: Console(file=shown, force_terminal=True, width=100))
    engine, prompts = World().engine, [prompt(5), prompt(21, 1)]
    engine.generate(prompts, QUICK, progress=False)
    assert shown.getvalue() == ""
    engine.generate(prompts, QUICK)
    assert "2/2 requests" in shown.getvalue()
    assert "8/8" in shown.getvalue()


def test_a_stop_token_ends_a_request() -> None:
    (whole,) = World().engine.generate([prompt(5)], QUICK, progress=False)
    stop = SamplingParams(max_tokens=4, stop_token_ids=(whole.token_ids[1],))
    engine = World().engine
    (output,) = engine.generate([prompt(5)], stop, progress=False)
    assert output.token_ids == whole.token_ids[:2]
    assert output.finish_reason == "stop"
    assert engine.eos_token_ids == (2,)


def test_a_recorded_trace_replays_in_another_mode() -> None:
    prompts = [prompt(30), prompt(18, 1)]
    always = {"kv_budget": 12, "interval": 4, "when": "always"}
    first = World(policy="tova", **always)
    outputs = first.generate(prompts)
    second = World(policy="tova", **always, variant="naive", trace=first.engine.trace)
    assert [each.token_ids for each in second.generate(prompts)] == [each.token_ids for each in outputs]
    assert second.engine.counters.num_evicted_tokens == first.engine.counters.num_evicted_tokens


def config_only(model_type: str, **fields: Any) -> Callable[[Path], None]:
    return lambda path: (path / "config.json").write_text(json.dumps({"model_type": model_type, **fields})) and None


@pytest.mark.parametrize(
    ("prepare", "settings", "says"),
    [
        (lambda path: None, {}, "no model folder"),
        (lambda path: (path / "config.json").write_text("{"), {}, r"[^.]: mend it"),
        (config_only("mistral"), {}, "sliding window of 4096"),
        (config_only("llama"), {}, "does not load"),
        (config_only("llama"), {"dtype": "float64"}, "dtype='float64'"),
        (config_only("llama"), {"device": "cuda:99"}, "'cpu' always works"),
    ],
)
def test_a_folder_that_cannot_serve_is_refused(
    tmp_path: Path, prepare: Callable[[Path], None], settings: dict[str, Any], says: str
) -> None:
    prepare(tmp_path)
    with pytest.raises(SpecError, match=says):
        TorchEngine(tmp_path, **settings)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"polcy": "h2o"}, "did you mean 'policy'"),
        ({"max_model_len": 4096}, "give 1 to the model's 512"),
        ({"max_num_seqs": 0}, "max_num_seqs=0"),
        ({"block_size": 0}, "block_size=0"),
        ({"policy": "h2o"}, "kv_budget"),
    ],
)
def test_bad_settings_are_refused(llama: Any, settings: dict[str, Any], says: str) -> None:
    with pytest.raises(SpecError, match=says):
        TorchEngine(llama, **settings)


def test_text_without_a_tokenizer_is_refused() -> None:
    with pytest.raises(SpecError, match="tokenizer"):
        World().engine.generate("hello", progress=False)


def test_a_token_that_the_model_does_not_know_is_refused_and_others_are_served() -> None:
    engine = World().engine
    with pytest.raises(SpecError, match="vocab_size=256"):
        engine.generate([[3, 256]], QUICK, progress=False)
    (output,) = engine.generate([[3, 255]], QUICK, progress=False)
    assert len(output.token_ids) == 4
