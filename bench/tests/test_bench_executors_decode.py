"""Decoding side by side: the same KV for all, the gate before the clock, what is timed, and memory."""

import json
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("jax")
pytest.importorskip("flax")
pytest.importorskip("orbax")
pytest.importorskip("transformers")

import torch

from vtoken.cli import main
from vtoken.serving.protocol import SamplingParams
from vtoken_bench.executors import grid
from vtoken_bench.executors.comparison import Comparison, Elapsed, GateError
from vtoken_bench.executors.decode import DecodeShape, compare_decoding
from vtoken_bench.executors.gate import NUM_STEPS, DecodeGate, Track, checked_requests
from vtoken_bench.executors.memory import available_bytes, growth, peak_rise, resident_bytes
from vtoken_bench.executors.models import EngineSide, Models
from vtoken_bench.executors.prompts import HFDecoder, Prompts, place_in_pool
from vtoken_bench.executors.sides import read_torch
from vtoken_bench.timing import Spread
from vtoken_bench.tiny_model import VOCABULARY, tiny_llama
from vtoken_torch.engine import TorchEngine
from vtoken_torch.hf.plan import StepPlan
from vtoken_torch.hf.runner import HFRunner
from vtoken_torch.kv_store import TorchKVStore

LENGTH = 24


@pytest.fixture
def prompts() -> Prompts:
    return Prompts(LENGTH, VOCABULARY)


def start(batch: int, dtype: torch.dtype, prompts: Prompts, side: str = "torch") -> tuple[DecodeGate, Any, Any]:
    """The gate, an engine with its requests, all of them checked."""
    own = tiny_llama(16).to(dtype)
    own.set_attn_implementation("eager")
    reference = own if dtype == torch.float32 else tiny_llama(16).to(dtype).float()
    reference.set_attn_implementation("eager")
    taken = prompts.take(reference, batch, dtype)
    engine = TorchEngine(tiny_llama(16).to(dtype), max_num_seqs=batch, max_model_len=LENGTH + 16)
    return DecodeGate(reference, own, taken), engine, place_in_pool(engine, taken)


def test_requests_whose_kv_was_placed_decode_what_prefilled_ones_do(prompts: Prompts) -> None:
    taken = prompts.take(tiny_llama(16), 2, torch.float32)
    placed, prefilled = (TorchEngine(tiny_llama(16), max_num_seqs=2, max_model_len=64) for _ in range(2))
    requests = place_in_pool(placed, taken)
    others = [prefilled.submit(prompt.token_ids, SamplingParams(max_tokens=8)) for prompt in taken]
    for _ in range(5):
        placed.step()
        prefilled.step()
    assert [request.output for request in requests] == [request.output[:5] for request in others]
    theirs = HFDecoder(tiny_llama(16), taken)
    assert [list(tokens) for tokens in zip(*(theirs.step() for _ in range(5)), strict=True)] == [
        request.output for request in requests
    ]


def test_prompts_repeat_beyond_4096_tokens_and_differ_in_their_last_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vtoken_bench.executors.prompts._MOST_TOKENS", 2 * LENGTH)
    prompts = Prompts(LENGTH, VOCABULARY)
    first, second, third = prompts.take(tiny_llama(16), 3, torch.float32)
    assert torch.equal(first.kv, third.kv)
    assert not torch.equal(first.kv, second.kv)
    assert len({prompt.token_ids[-1] for prompt in (first, second, third)}) == 3
    assert first.kv.shape == (LENGTH - 1, 2, 2, 2, 16)
    half = first.shortened(LENGTH // 2)
    assert (len(half.token_ids), len(half.kv), half.token_ids[-1]) == (12, 11, first.token_ids[-1])


@pytest.mark.parametrize(("dtype", "at_least"), [(torch.float32, 1e-9), (torch.bfloat16, 1e-4)])
def test_the_gate_passes_an_engine_and_tells_how_far_it_is_off(
    dtype: torch.dtype, at_least: float, prompts: Prompts
) -> None:
    gate, engine, requests = start(3, dtype, prompts)
    gate.check("torch", Track.of_engine(engine, requests, read_torch, gate.path))
    assert at_least < gate.figures["kv_error"]["torch"] <= gate.figures["kv_error"]["allowed"] < 0.1
    assert gate.figures["equal_tokens"]["of"] == 3 * NUM_STEPS
    assert gate.figures["equal_tokens"]["torch"] >= 3 * NUM_STEPS - 2


def _forgets_a_token(monkeypatch: pytest.MonkeyPatch) -> None:
    set_words = TorchKVStore.set_words
    monkeypatch.setattr(
        TorchKVStore,
        "set_words",
        lambda store, row, at, words: set_words(store, row, at, [word & ~1 if word > 1 else word for word in words]),
    )


def _flatter_softmax(monkeypatch: pytest.MonkeyPatch) -> None:
    attend = StepPlan.attend
    monkeypatch.setattr(
        StepPlan, "attend", lambda plan, layer, q, v, scale, extras: attend(plan, layer, q, v, 0.9 * scale, extras)
    )


def _wrong_neighbour(monkeypatch: pytest.MonkeyPatch) -> None:
    attend = StepPlan.attend

    def rolled(*given: Any) -> torch.Tensor:
        out = attend(*given)  # the first two axes are the tokens'
        return out.flatten(0, 1).roll(1, 0).view(out.shape)

    monkeypatch.setattr(StepPlan, "attend", rolled)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("spoil", [_forgets_a_token, _flatter_softmax, _wrong_neighbour])
def test_the_gate_refuses_subtle_faults(
    spoil: Callable[[pytest.MonkeyPatch], None], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch, prompts: Prompts
) -> None:
    spoil(monkeypatch)
    gate, engine, requests = start(3, dtype, prompts)
    with pytest.raises(GateError, match="torch: KV of 4 decoded tokens is"):
        gate.check("torch", Track.of_engine(engine, requests, read_torch, gate.path))


def test_the_gate_refuses_tokens_that_are_not_the_likeliest(prompts: Prompts) -> None:
    gate, engine, requests = start(2, torch.float32, prompts)
    track = Track.of_engine(engine, requests, read_torch, gate.path)
    with pytest.raises(GateError, match=r"torch: greedy tokens .* are not transformers' .* below the highest"):
        gate.check("torch", Track((track.tokens + 1) % VOCABULARY, track.kv))


def test_checked_requests_are_few_and_spread() -> None:
    assert checked_requests(1, 512) == [0]
    assert checked_requests(8, 512) == list(range(8))
    assert checked_requests(32, 512) == [0, 4, 8, 13, 17, 22, 26, 31]
    assert checked_requests(32, 4096) == [0, 31]
    assert checked_requests(8, 100_000) == [0]


class Twins(Models):
    """JAX's side is PyTorch's too: nothing is compiled."""

    @property
    def sides(self) -> tuple[EngineSide, EngineSide]:
        _, torch = super().sides
        return replace(torch, name="jax"), torch


@pytest.fixture(scope="module")
def twins(tiny_folder: Path) -> Twins:
    return Twins(tiny_folder, "float32", "cpu")


def compare(
    twins: Twins, prompts: Prompts, shape: DecodeShape, rounds: int, ticks: Iterable[float]
) -> list[Comparison]:
    """With a clock that shows ``ticks``, and ten times as much on the wall."""
    times = iter(ticks)

    def clock(work: Callable[[], object]) -> Elapsed:
        work()
        us = next(times)
        return Elapsed(us, 10 * us)

    return compare_decoding(twins, prompts, shape, clock, rounds, {"batch": shape.batch})


def test_steps_are_timed_in_turn(twins: Twins, prompts: Prompts) -> None:
    # jax, torch, hf, two matmuls, memcpy: 1 to 6 are dropped, then 7 to 12 and 13 to 18; then half the context
    step, rates, pools, *_ = compare(twins, prompts, DecodeShape(2, LENGTH), 2, range(1, 27))
    assert (step.jax, step.torch) == (Spread(10, 7, 13), Spread(11, 8, 14))
    assert step.figure == Spread.of([7 / 8, 13 / 14])
    assert step.wall["hf"] == Spread(120, 90, 150)
    assert step.ratios == {"hf/jax": Spread.of([9 / 7, 15 / 13]), "hf/torch": Spread.of([9 / 8, 15 / 14])}
    assert step.shares["matmul"] == pytest.approx(((10 / 7 + 16 / 13) / 2, (11 / 8 + 17 / 14) / 2))
    assert step.floors["memcpy"].jax == pytest.approx((12 / 7 + 18 / 13) / 2)
    assert step.shares["attention"] == (0, 0)  # half the context took longer
    assert rates.jax == Spread.of([2e6 / 70, 2e6 / 130])
    assert pools.jax == pools.torch
    assert step.notes == ["KV of 2 different prompts, computed by transformers in float32, the same bits for all"]


def test_attention_is_twice_what_half_the_context_saves(twins: Twins, prompts: Prompts) -> None:
    ticks = [100.0] * 5 * 2 + [80.0, 95.0] * 4  # a dropped round and a timed one, then half the context
    step, rates, *_ = compare(twins, prompts, DecodeShape(2, LENGTH, with_hf=False), 1, ticks)
    assert step.shares["attention"] == pytest.approx((0.4, 0.1))
    assert "hf" not in step.as_record()
    assert rates.others == {}
    assert step.notes[-1].startswith("without transformers")


@pytest.fixture
def run(tmp_path: Path, twins: Twins, monkeypatch: pytest.MonkeyPatch) -> Callable[[], tuple[int, dict[str, Any]]]:
    """The suite's decode at a small shape, with twins; gives the exit code and the record."""

    def bench_small() -> tuple[int, dict[str, Any]]:
        monkeypatch.setattr(grid, "Models", lambda *_: twins)
        path = tmp_path / "record.json"
        small = ["--batch", "2", "--live", "24", "--repeats", "2", "--only", "decode", "--model", str(twins.folder)]
        return main(["bench", "executors", *small, "--json", str(path)]), json.loads(path.read_text())

    return bench_small


def test_an_engine_with_other_tokens_is_not_timed(
    run: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    logits = HFRunner.logits
    monkeypatch.setattr(HFRunner, "logits", lambda *given: -logits(*given))
    code, record = run()
    assert (code, record["rows"]) == (1, [])
    (line,) = record["summary"]["refused"]
    assert line.startswith("decode, batch 2, live 24, f32: jax: greedy tokens")
    assert "refused decode" in capsys.readouterr().out


def test_a_shape_that_does_not_fit_is_skipped_with_the_reason(
    run: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(grid, "available_bytes", lambda: 1_000_000_000)
    code, record = run()
    assert (code, record["rows"]) == (0, [])
    assert record["summary"]["skipped"] == [
        "decode, batch 2, live 24, f32: two pools need 2.0 GB of memory, 1.0 GB are available"
    ]
    assert "skipped decode" in capsys.readouterr().out


def test_both_frameworks_multiply_by_the_same_matrices(twins: Twins) -> None:
    jax, torch = (side.products(2)() for side in Models.sides.fget(twins))  # type: ignore[attr-defined]  # a property
    assert sum(each.shape[1] for each in jax) == sum(
        each.out_features for each in twins.own.modules() if hasattr(each, "out_features")
    )
    (head,) = (each for each in jax if each.shape[1] == VOCABULARY)
    assert float(head[0, 0]) == pytest.approx(torch, rel=1e-4)


def test_memory_grows_with_what_is_held_and_rises_with_what_is_let_go() -> None:
    before = resident_bytes()
    if before is None:
        pytest.skip("this system does not tell")
    held = torch.ones(50_000_000, dtype=torch.uint8)
    assert 45_000_000 < (growth(before) or 0) < 70_000_000
    rise = peak_rise(lambda: torch.ones(80_000_000, dtype=torch.uint8).max())
    assert rise is not None
    assert 75_000_000 < rise < 120_000_000
    del held
    assert (growth(before) or 0) < 45_000_000
    assert (available_bytes() or 0) > 0
