"""``vtoken bench executors`` whole, at small shapes."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("jax")
pytest.importorskip("flax")
pytest.importorskip("orbax")
pytest.importorskip("transformers")

from vtoken.cli import main
from vtoken_jax.kv_store import JaxKVStore
from vtoken_torch.executor import TorchExecutor
from vtoken_torch.kv_store import TorchKVStore

SMALL = ("--batch", "2", "--live", "32", "--repeats", "2")
PROGRAM_ROWS = ["append_us", "attend_us", "fingerprint_us", "move_us", "pool_bytes"]
DECODE_ROWS = ["decode_step_us", "decode_tokens_per_s", "decode_kv_bytes", "decode_memory_bytes"]


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
    assert record["schema"] == "vtoken/bench-executors/2"
    assert record["summary"]["refused"] == []
    assert record["summary"]["clock"] == "processor"
    assert [row["name"] for row in record["rows"]] == PROGRAM_ROWS * 2
    for row in record["rows"]:
        low, high = row["spread"]
        assert 0 < low <= row["value"] <= high
        assert row["jax"]["value"] > 0
        assert row["torch"]["value"] > 0
        assert list(row["shares"]) == ([] if row["name"] == "pool_bytes" else ["calls", "memcpy", "rest"])
    (f32, bf16) = (row for row in record["rows"] if row["name"] == "pool_bytes")
    assert f32["params"] == {"batch": 2, "live": 32, "dtype": "f32"}
    assert f32["jax"]["value"] == f32["torch"]["value"] > 1.9 * bf16["torch"]["value"]
    assert "batch 2, live 32, bf16" in capsys.readouterr().out


def test_both_engines_and_transformers_decode_the_same_model(run: Any, tiny_folder: Path) -> None:
    code, record = run("--only", "decode", "--model", str(tiny_folder), "--dtype", "bf16")
    assert (code, record["summary"]["skipped"]) == (0, [])
    step, rates, pools, memory = record["rows"]
    assert [row["name"] for row in record["rows"]] == DECODE_ROWS
    assert [step["rounds"], rates["rounds"]] == [2, 2]
    assert list(step["wall_us"]) == ["jax", "torch", "hf"]
    assert list(step["ratios"]) == ["hf/jax", "hf/torch"]
    assert list(step["shares"]) == ["matmul", "attention", "rest"]
    assert set(step["bound_by"]) == {"jax", "torch"}
    low, high = step["wall_us"]["hf"]["spread"]
    assert rates["hf"]["spread"] == pytest.approx([2e6 / high, 2e6 / low])
    assert pools["hf"]["value"] % (2 * 2 * 2 * 2 * 8 * 2) == 0  # requests, layers, K and V, heads, head size, bytes
    assert pools["jax"]["value"] == pools["torch"]["value"] > pools["hf"]["value"]
    assert memory["jax"]["value"] > 0
    errors = step["gate"]["kv_error"]
    assert 1e-4 < errors["jax"] <= errors["allowed"]
    assert 1e-4 < errors["torch"] <= errors["allowed"] < 0.1


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


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--batch", "0"), "'0' is no whole number of at least 1"),
        (("--json", "."), "is a folder"),
        (("--live", "1", "--only", "programs"), "live=1: give at least 2 tokens"),
        (("--device", "cuda"), "--device cuda: JAX has none here"),
        (("--markdown", "nowhere.json"), "nowhere.json is no record of this suite"),
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


def test_a_record_of_another_suite_is_no_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "other.json"
    path.write_text('{"schema": "vtoken/bench-executors/1"}')
    assert bench("--markdown", str(path)) == 2
    assert "is a record of vtoken/bench-executors/1, not of vtoken/bench-executors/2" in capsys.readouterr().err
