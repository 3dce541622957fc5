import errno
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from vtoken.cli import main
from vtoken.errors import SpecError
from vtoken.plugins import get_plugin
from vtoken_bench.demo import run as demo_run
from vtoken_conformance.mutants import MUTANTS

pytest.importorskip("torch")
pytest.importorskip("transformers")

FILES = ["held-blocks.png", "report.html", "report.json"]


@pytest.fixture
def demo(tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """Runs the demo on the tiny model with a small prompt, below an empty working folder."""
    monkeypatch.chdir(tmp_path)

    def run(*more: str) -> int:
        small = ["--model", str(tiny_folder), "--prompt-tokens", "60", "--tokens", "20", "--block-size", "4"]
        small += ["--chunk", "32", "--interval", "8", "--executor", "reference", "--no-serving"]
        try:
            return main(["demo", *small, *more])
        except SystemExit as stop:
            return int(stop.code or 0)

    return run


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_run_writes_its_files_and_prints_table_text_and_verdict(
    demo: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert demo() == 0
    out = capsys.readouterr().out

    traces = [f"victims-{policy}.jsonl" for policy in ("h2o", "random", "streaming_llm")]
    assert files(tmp_path) == ["results"]
    assert files(tmp_path / "results" / "demo") == [*FILES, *traces]
    record = json.loads((tmp_path / "results" / "demo" / "report.json").read_text())
    assert record["summary"]["same_bytes"] is True
    assert "Same bytes: 10 replays agree" in out
    assert "results/demo/report.html" in out
    assert all(f"{row['policy'] or '-'} " in out and str(row["held_blocks_end"]) in out for row in record["rows"])


def test_the_comparison_inside_vllm_comes_first_and_a_block_leaked_there_fails_the_demo(
    tiny_folder: Path,
    tmp_path: Path,
    pressure_record: dict[str, Any],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(demo_run, "pressure_record", lambda _: pressure_record)
    small = f"demo --model {tiny_folder} --prompt-tokens 20 --tokens 4 --executor reference --policy random".split()
    assert main([*small, "--out", str(tmp_path)]) == 0
    out = capsys.readouterr().out

    assert out.startswith("Inside vLLM: 16 requests of 512 + 256 tokens to tiny [bold], a pool of 100 blocks of 32")
    order = [
        "2,800",
        pressure_record["about_naive"],
        "Every block is back",
        "tiny-llama goes on with",
        "Its KV replayed:",
        "Same bytes:",
    ]
    assert sorted(order, key=out.index) == order
    assert json.loads((tmp_path / "report.json").read_text())["serving"] == pressure_record

    pressure_record["summary"]["leaked_blocks"] = 1
    assert main([*small, "--out", str(tmp_path)]) == 1
    assert '<p class="bad">Leaked blocks: 1.</p>' in (tmp_path / "report.html").read_text()
    assert "Leaked blocks: 1." in capsys.readouterr().out


def test_all_executors_and_other_policies_on_a_file(demo: Callable[..., int], tmp_path: Path) -> None:
    pytest.importorskip("jax")
    (tmp_path / "tale.txt").write_text("It was the best of times, it was the worst of times. " * 2)
    more = "--prompt-file tale.txt --kv-budget 24 --out here --executor torch --executor jax"
    more += " --json same.json"
    assert demo(*more.split(), "--policy", "tova", "--policy", "snapkv", "--policy", "scissorhands") == 0

    record = json.loads((tmp_path / "here" / "report.json").read_text())
    assert (tmp_path / "same.json").read_bytes() == (tmp_path / "here" / "report.json").read_bytes()
    assert list(record["rows"][1]["executors"]) == ["reference", "torch", "jax"]
    assert [row["policy"] for row in record["rows"][1::3]] == ["tova", "snapkv", "scissorhands"]
    assert all(row["live_tokens_end"] <= 24 + 8 for row in record["rows"] if row["policy"])
    assert record["run"]["prompt"] == "tale.txt"


def test_a_broken_executor_makes_the_exit_code_1_and_is_named(
    demo: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo_run, "get_plugin", lambda group, name: MUTANTS["FirstLayerMoved"])
    assert demo("--policy", "random") == 1
    out = capsys.readouterr().out

    assert "Difference: random, eager, reference: step" in out.replace("\n", " ")
    assert "differs" in out
    assert json.loads((tmp_path / "results/demo/report.json").read_text())["summary"]["same_bytes"] is False


def test_an_executor_that_is_not_installed_is_shown_as_missing(
    demo: Callable[..., int], tiny_folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def only_reference(group: str, name: str) -> Any:
        if name != "reference":
            raise SpecError(f"executor {name!r} does not load: no {name} here")
        return get_plugin(group, name)

    monkeypatch.setattr(demo_run, "get_plugin", only_reference)
    assert main(f"demo --no-serving --model {tiny_folder} --prompt-tokens 20 --tokens 4 --policy random".split()) == 0
    out = capsys.readouterr().out

    assert "jax is missing: executor 'jax' does not load: no jax here" in out
    assert "Same bytes: 4 replays" in out
    assert demo("--executor", "jax") == 2  # asked for by name, it must load


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--model nowhere", "no such model folder: nowhere"),
        ("--prompt-file gone.txt", "no such prompt file: gone.txt"),
        ("--prompt-file empty.txt", "prompt file empty.txt is empty"),
        ("--prompt-tokens 250", "250 tokens and 20 are to follow, but tiny-llama has 256 positions"),
        ("--prompt-tokens 99999", "tokens, not 99999"),
        ("--ratio 0.5 --kv-budget 4", "both given"),
        ("--ratio 1.5", "eviction_ratio=1.5"),
        ("--policy h2", "unknown policy 'h2': did you mean 'h2o'?"),
        ("--policy none", "name a policy that evicts"),
        ("--executor tourch", "did you mean 'torch'?"),
        ("--executor vtoken.reference:Executor", "the demo takes registered executors alone (jax, "),
        ("--prompt-file .", "prompt file . cannot be read (Is a directory): give a text file"),
        ("--json .", "is a folder"),
        ("--block-size 129", "--block-size 129: give at most 128"),
        ("--tokens 0", "'0' is no whole number of at least 1"),
        ("--tokens few", "'few' is no whole number of at least 1"),
        ("--out empty.txt", "empty.txt is a file"),
    ],
)
def test_bad_usage_is_one_clear_line_and_leaves_nothing(
    demo: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str], options: str, message: str
) -> None:
    (tmp_path / "empty.txt").write_text("")
    assert demo(*options.split()) == 2
    error = capsys.readouterr().err.strip().splitlines()

    assert message in error[-1]
    assert error[-1].startswith("vtoken demo: ")
    assert len(error) == 1 or error[0].startswith("usage:")
    assert files(tmp_path) == ["empty.txt"]


def test_a_disk_that_fills_up_at_the_end_leaves_nothing(
    demo: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path, data: bytes) -> None:
        path.write_bytes(data[:10])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    monkeypatch.setattr(demo_run, "write_bytes", full)
    assert demo("--policy", "random") == 2
    assert capsys.readouterr().err.strip().startswith("vtoken demo: [Errno 28] No space left on device")
    assert files(tmp_path) == []


def test_an_interrupt_while_the_model_runs_is_one_word_and_leaves_nothing(tiny_folder: Path, tmp_path: Path) -> None:
    """A process of its own, interrupted as Ctrl-C does it, as soon as the model runs."""
    program = (
        "import os, signal, sys, vtoken_bench.demo.record_run as module\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # ignored where the tests run in the background
        "from vtoken.cli import main\n"
        "step = module._Run._step\n"
        "def interrupted(self, *args):\n"
        "    os.kill(os.getpid(), signal.SIGINT)\n"
        "    return step(self, *args)\n"
        "module._Run._step = interrupted\n"
        f"small = ['--model', {str(tiny_folder)!r}, '--prompt-tokens', '60', '--tokens', '20', '--no-serving']\n"
        "sys.exit(main(['demo', *small]))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )

    assert done.returncode == 130
    assert done.stderr.strip() == "interrupted"
    assert done.stdout == ""
    assert files(tmp_path) == []


def test_the_help_names_the_exit_codes_and_every_option(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["demo", "--help"])
    shown = capsys.readouterr().out

    assert "exit codes: 0 same bytes, 1 a difference or a leaked block, 2 bad usage" in shown
    for option in (
        "--model",
        "--prompt-file",
        "--prompt-tokens",
        "--tokens",
        "--policy",
        "--executor",
        "--out",
        "--json",
    ):
        assert option in shown
