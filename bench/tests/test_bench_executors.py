import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("jax")
pytest.importorskip("flax")
pytest.importorskip("orbax")
pytest.importorskip("transformers")

from vtoken.cli import main
from vtoken_bench.executors.comparison import Elapsed, GateError, Samples, comparison_table, device_clock
from vtoken_bench.executors.decode import compare_engines
from vtoken_bench.executors.moves import compare_moves
from vtoken_bench.executors.program import Program, make_spec
from vtoken_bench.record import Row
from vtoken_bench.suites import executors as suite
from vtoken_bench.timing import Spread
from vtoken_bench.tiny_model import tiny_llama
from vtoken_jax.kv_store import JaxKVStore
from vtoken_torch.engine import TorchEngine
from vtoken_torch.executor import TorchExecutor
from vtoken_torch.hf.runner import HFRunner
from vtoken_torch.kv_store import TorchKVStore

SMALL = ("--batch", "2", "--live", "32", "--repeats", "2")
PROGRAM_ROWS = ["append_us", "attend_us", "fingerprint_us", "move_us", "pool_bytes"]


def bench(*arguments: str) -> int:
    try:
        return main(["bench", "executors", *arguments])
    except SystemExit as stop:
        return int(stop.code or 0)


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., tuple[int, dict[str, Any]]]:
    """Runs the suite at a small shape; gives the exit code and the record."""

    def bench_small(*arguments: str) -> tuple[int, dict[str, Any]]:
        path = tmp_path / "record.json"
        code = bench(*SMALL, *arguments, "--json", str(path))
        return code, json.loads(path.read_text())

    return bench_small


def test_programs_of_both_executors_are_checked_and_timed(run: Any, capsys: pytest.CaptureFixture[str]) -> None:
    code, record = run("--only", "programs", "--dtype", "f32", "bf16")
    assert code == 0
    assert record["schema"] == "vtoken/bench-executors/1"
    assert record["summary"]["refused"] == []
    assert record["summary"]["clock"] == "processor"
    assert [row["name"] for row in record["rows"]] == PROGRAM_ROWS * 2
    for row in record["rows"]:
        low, high = row["spread"]
        assert 0 < low <= row["value"] <= high
        assert row["jax"]["value"] > 0
        assert row["torch"]["value"] > 0
        assert list(row["bound_by"]) == ([] if row["name"] == "pool_bytes" else ["memcpy"])
    (f32, bf16) = (row for row in record["rows"] if row["name"] == "pool_bytes")
    assert f32["params"] == {"batch": 2, "live": 32, "dtype": "f32"}
    assert f32["jax"]["value"] == f32["torch"]["value"] > 1.9 * bf16["torch"]["value"]
    assert "append_us" in capsys.readouterr().out


def test_moves_alone_are_checked_and_timed_beside_copies_of_the_same_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    spec, clock = make_spec("bfloat16", 1, 640), device_clock("cpu")

    def compare() -> Any:
        sides = suite._jax_side(), suite._torch_side("cpu")
        memcpy = partial(suite._memcpy, "cpu")
        return compare_moves(*sides, spec, (4, 20), clock, memcpy, 2, {"layers": 4}, with_rows=True)

    few, many = compare()
    assert [row.params for row in (few, many)] == [{"moves": 4, "layers": 4}, {"moves": 20, "layers": 4}]
    assert few.name == "store_move_us"
    assert list(few.others) == ["rows"]
    assert list(few.bound_shares) == ["memcpy"]
    _lost_moves(monkeypatch)
    with pytest.raises(GateError, match="JaxKVStore: tokens do not lie where 4 moves bring them"):
        compare()


def test_both_engines_and_transformers_decode_the_same_model(run: Any, tiny_folder: Path) -> None:
    code, record = run("--only", "decode", "--model", str(tiny_folder))
    assert code == 0
    (row,) = record["rows"]
    assert row["name"] == "decode_step_us"
    assert row["hf"]["value"] > 0
    assert list(row["wall_us"]) == ["jax", "torch", "hf"]
    assert list(row["ratios"]) == ["hf/jax", "hf/torch"]
    assert list(row["bound_by"]) == ["matmul"]


def test_prompts_that_decode_before_others_are_compared_token_by_token() -> None:
    sizes: dict[str, Any] = {"chunk_tokens": 16, "max_model_len": 64}
    engines = [TorchEngine(tiny_llama(16), **sizes) for _ in range(2)]
    prompts = [[3 + request, *range(20, 35)] for request in range(4)]
    times = iter(range(1, 13))  # two timed rounds after a dropped one, of four works each

    def clock(work: Callable[[], object]) -> Elapsed:
        work()
        us = float(next(times))
        return Elapsed(us, 10 * us)

    row = compare_engines(engines[0], engines[1], tiny_llama(16), prompts, clock, 2, {})
    assert row.jax == Spread(7, 5, 9)
    assert row.figure == Spread.of([5 / 6, 9 / 10])
    assert row.ratios == {"hf/jax": Spread.of([7 / 5, 11 / 9]), "hf/torch": Spread.of([7 / 6, 11 / 10])}
    assert row.wall == {"jax": Spread(70, 50, 90), "torch": Spread(80, 60, 100), "hf": Spread(90, 70, 110)}
    assert all(engine.loop.is_idle for engine in engines)


def test_an_engine_with_other_tokens_is_not_timed(
    run: Any, tiny_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    logits = HFRunner.logits
    monkeypatch.setattr(HFRunner, "logits", lambda *given: -logits(*given))
    code, record = run("--only", "decode", "--model", str(tiny_folder))
    assert (code, record["rows"]) == (1, [])
    (line,) = record["summary"]["refused"]
    assert line.startswith("decode, batch 2, live 32, f32: torch: greedy tokens")
    assert "not timed" in capsys.readouterr().out


def _lost_moves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(JaxKVStore, "move", lambda *_: None)


def _scaled_queries(monkeypatch: pytest.MonkeyPatch) -> None:
    attend = TorchKVStore.attend
    monkeypatch.setattr(TorchKVStore, "attend", lambda store, row, q, at: attend(store, row, bytes(len(q)), at))


def _swapped_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    append = TorchExecutor.append

    def swapped(executor: TorchExecutor, req_id: str, num_tokens: int, kv: Any) -> None:
        size = executor.spec.token_bytes  # only in a request that is not checked against the reference
        append(executor, req_id, num_tokens, bytes(kv[size:]) + bytes(kv[:size]) if req_id == "1" else kv)

    monkeypatch.setattr(TorchExecutor, "append", swapped)


def _lost_word(monkeypatch: pytest.MonkeyPatch) -> None:
    kill = TorchExecutor.kill
    monkeypatch.setattr(TorchExecutor, "kill", lambda executor, req_id, at: kill(executor, req_id, list(at)[1:]))


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (_lost_moves, "jax, compacted: fingerprint"),
        (_scaled_queries, "torch, appended: attention is"),
        (_swapped_tokens, "fingerprints: "),
        (_lost_word, "plans: "),
    ],
)
def test_a_broken_executor_is_not_timed(
    run: Any, monkeypatch: pytest.MonkeyPatch, spoil: Callable[[pytest.MonkeyPatch], None], reason: str
) -> None:
    spoil(monkeypatch)
    code, record = run("--only", "programs")
    assert (code, record["rows"]) == (1, [])
    (line,) = record["summary"]["refused"]
    assert line.startswith(f"programs, batch 2, live 32, f32: {reason}")


def timed(*us: float) -> list[Elapsed]:
    """Calls in which one waits half the processor time."""
    return [Elapsed(each, each / 2) for each in us]


def test_ratios_and_bounds_are_taken_round_by_round() -> None:
    samples = Samples(timed(10, 40, 30), timed(10, 20, 60), {"hf": timed(5, 10, 60)}, {"memcpy": timed(1, 2, 6)})
    row = samples.row("move_us", {"batch": 1})
    assert (row.figure.low, row.figure.median, row.figure.high) == (0.5, 1, 2)
    assert row.bound_shares == {"memcpy": (0.1, 0.1)}
    record = row.as_record()
    assert record["torch"] == {"value": 20.0, "spread": [10.0, 60.0]}
    assert record["hf"]["value"] == 10
    assert record["wall_us"]["jax"] == {"value": 15.0, "spread": [5.0, 20.0]}
    assert record["wall_us"]["hf"] == {"value": 5.0, "spread": [2.5, 30.0]}
    assert record["ratios"]["hf/jax"] == {"value": 0.5, "spread": [0.25, 2.0]}
    assert record["ratios"]["hf/torch"] == {"value": 0.5, "spread": [0.5, 1.0]}
    assert record.items() >= Row("move_us", "jax/torch", row.figure, params={"batch": 1}).as_record().items()


def test_the_table_fits_100_columns(capsys: pytest.CaptureFixture[str]) -> None:
    from rich.console import Console

    samples = Samples(timed(246_000), timed(228_000), {"hf": timed(310_000)}, {"matmul": timed(96_000)})
    row = samples.row("decode_step_us", {"batch": 32, "live": 4096, "dtype": "f32"})
    Console(width=100).print(comparison_table("", [row]))
    lines = [line.split() for line in capsys.readouterr().out.splitlines() if line.strip()]
    assert [" ".join(line) for line in lines[2:]] == [
        "decode_step_us 32, 4096, f32 246,000 228,000 1.08 1.08 - 1.08 123 / 114 matmul 39% / 42%",
        "hf/jax 1.26 1.26 - 1.26 155 hf 310,000",
        "hf/torch 1.36 1.36 - 1.36",
    ]


def test_the_clock_of_the_cpu_counts_other_threads_and_no_waiting() -> None:
    from threading import Thread
    from time import sleep, thread_time

    def busy() -> None:
        end = thread_time() + 0.03
        while thread_time() < end:
            pass

    def elsewhere() -> None:
        thread = Thread(target=busy)
        thread.start()
        thread.join()

    assert device_clock("cpu")(elsewhere).us >= 30_000
    us, wall_us = device_clock("cpu")(lambda: sleep(0.05))
    assert us < 50_000 <= wall_us
    us, wall_us = device_clock("cuda")(lambda: sleep(0.05))
    assert 50_000 <= us == wall_us


def test_requests_hold_different_bytes() -> None:
    program = Program(make_spec("float32", 2, 8), 2, 8)
    size = program.spec.token_bytes
    assert len(program.kv(0)) == len(program.kv(1)) == 8 * size
    assert program.kv(0)[size:] == program.kv(1)[:-size] != program.kv(0)[:-size]


@pytest.mark.parametrize(
    ("arguments", "programs", "decodes"),
    [
        ((), 5, 2),
        (("--full",), 12, 5),
        (("--full", "--only", "decode"), 0, 5),
        (("--batch", "1", "8", "--only", "programs"), 2, 0),
    ],
)
def test_flags_choose_the_shapes(arguments: tuple[str, ...], programs: int, decodes: int) -> None:
    import argparse

    parser = argparse.ArgumentParser()
    suite.command.add_arguments(parser)
    assert tuple(map(len, suite._shapes(parser.parse_args(arguments)))) == (programs, decodes)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--batch", "0"), "'0' is no whole number of at least 1"),
        (("--json", "."), "is a folder"),
        (("--live", "1", "--only", "programs"), "live=1: give at least 2 tokens"),
        (("--device", "cuda"), "--device cuda: JAX has none here"),
    ],
)
def test_bad_usage_is_named_and_ends_with_code_2(
    arguments: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    import jax

    if "cuda" in arguments and jax.default_backend() != "cpu":
        pytest.skip("JAX has a GPU here")
    assert bench(*arguments) == 2
    assert message in capsys.readouterr().err
