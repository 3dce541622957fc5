from pathlib import Path

import pytest

pytest.importorskip("torch")

import torch

from vtoken_bench import engine_speed
from vtoken_bench.engine_speed import compare_decode, decoding_engine, decoding_hf
from vtoken_bench.tiny_model import tiny_llama
from vtoken_torch.engine import TorchEngine

PROMPTS = torch.randint(3, 512, (4, 12), generator=torch.Generator().manual_seed(0)).tolist()


def test_both_decode_the_same_tokens_step_by_step() -> None:
    engine = TorchEngine(tiny_llama(16), max_model_len=64)
    with decoding_engine(engine, PROMPTS) as ours, decoding_hf(tiny_llama(16), PROMPTS) as theirs:
        requests = engine.loop.requests
        for _ in range(5):
            ours()
            latest = theirs()
            assert [[request.output[-1]] for request in requests] == latest
    assert engine.loop.is_idle


def test_the_ratio_is_theirs_over_ours_pair_by_pair(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([100.0, 100.0, 10.0, 20.0, 10.0, 5.0, 20.0, 20.0])
    monkeypatch.setattr(engine_speed, "cpu_us", lambda work: (work() and None) or next(clock))
    engine = TorchEngine(tiny_llama(16), max_model_len=64)

    speed = compare_decode(engine, tiny_llama(16), PROMPTS, num_steps=3)

    assert (speed.ours_us.low, speed.ours_us.high) == (10, 20)
    assert (speed.theirs_us.low, speed.theirs_us.high) == (5, 20)
    assert (speed.speed_ratio.low, speed.speed_ratio.median, speed.speed_ratio.high) == (0.5, 1, 2)


def test_the_command_has_a_line_for_each_length(tiny_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert engine_speed.main(["--model", str(tiny_folder), "--batch", "2", "--live", "9", "20", "--steps", "2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["9"] * 3 + ["20"] * 3
    assert all(float(line.split("[")[0].split()[-1]) > 0 for line in lines)
