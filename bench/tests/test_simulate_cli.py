import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from vtoken.cli import main

COMMAND = "simulate --prompt 60 --output 100 --ratio 0.5 --block-size 4 --pool-blocks 100 --chunk 32 --interval 16"


def simulate(*more: str, command: str = COMMAND) -> int:
    try:
        return main([*command.split(), "--policy", "h2o", *more])
    except SystemExit as stop:
        return int(stop.code or 0)


@pytest.fixture(scope="module")
def record(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    path = tmp_path_factory.mktemp("simulate") / "record.json"
    assert simulate("--json", str(path)) == 0
    loaded: dict[str, Any] = json.loads(path.read_text())
    return loaded


def test_the_record_has_a_row_for_each_variant_and_says_how_it_was_made(record: dict[str, Any]) -> None:
    assert record["schema"] == "vtoken/simulate/1"
    assert record["environment"]["python"]
    assert record["workload"] == {"prompt": 60, "output": 100, "block_size": 4, "pool_blocks": 100, "chunk": 32}
    assert record["config"]["policy"] == "h2o"
    assert [row["variant"] for row in record["rows"]] == ["native", "naive", "lazy", "fill", "vtoken"]
    keys = {"peak_blocks", "final_blocks", "copies", "worst_step_copies", "recycled", "evictions", "plans"}
    assert all(keys < row.keys() for row in record["rows"])


def test_the_records_summary_and_rows_agree(record: dict[str, Any]) -> None:
    most = {row["variant"]: row["max_requests"] for row in record["rows"]}

    assert record["summary"]["max_requests"] == most
    assert most["native"] == 2  # 40 blocks each
    assert most["vtoken"] > most["native"]
    for row in record["rows"]:
        assert row["together"]["num_requests"] == row["max_requests"]


def test_every_series_has_one_length_and_ends_at_the_last_token(record: dict[str, Any]) -> None:
    series = record["series"]
    lengths = {len(series["computed_tokens"]), len(series["ideal_blocks"]), *map(len, series["held_blocks"].values())}

    assert len(lengths) == 1
    assert series["computed_tokens"][-1] == 160
    assert series["held_blocks"]["native"][-1] == 40
    assert series["held_blocks"].keys() == record["summary"]["max_requests"].keys()


def test_the_same_command_gives_the_same_record(record: dict[str, Any], tmp_path: Path) -> None:
    assert simulate("--json", str(tmp_path / "again.json")) == 0

    again = json.loads((tmp_path / "again.json").read_text())
    assert {**again, "environment": None} == {**record, "environment": None}


def test_mode_chooses_whose_curve_is_printed_and_all_variants_are_summed_up(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert simulate("--mode", "lazy") == 0

    out = capsys.readouterr().out
    assert out.startswith("lazy: held blocks of one request alone")
    for variant in ("native", "naive", "fill", "vtoken"):
        assert f"\n {variant}" in out or f"\n{variant}" in out


@pytest.mark.parametrize(("name", "start"), [("held.png", b"\x89PNG"), ("held.svg", b"<?xml")])
def test_the_plot_is_a_picture_of_the_kind_that_its_name_says(tmp_path: Path, name: str, start: bytes) -> None:
    assert simulate("--plot", str(tmp_path / name)) == 0

    assert (tmp_path / name).read_bytes().startswith(start)
    assert [path.name for path in tmp_path.iterdir()] == [name]


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--ratio", "1.5"], "eviction_ratio=1.5: give a share between 0 and 1"),
        (["--ratio", "1"], "eviction_ratio=1"),
        (["--kv-budget", "10"], "needs exactly one of kv_budget and eviction_ratio"),
        (["--pool-blocks", "5"], "the pool has 5"),
        (["--pool-blocks", "0"], "pool_blocks=0: give at least 1"),
        (["--output", "0"], "output=0: give at least 1"),
        (["--block-size", "1000"], "block_size=1000"),
        (["--policy", "h20"], "did you mean 'h2o'"),
        (["--interval", "0"], "interval=0"),
        (["--plot", "held.pdf"], "end the name in .png or .svg"),
        (["--json", "."], "is a folder"),
        (["--json", ""], "as an empty name is"),
        (["--plot", "new/held.png"], "no such folder new: make it"),
        (["--pool-blocks", "100000000000"], "pool_blocks=100000000000: some 5,000,000,000 requests of 160 tokens"),
        (["--pool-blocks", "1000000"], "goes to 1,000 requests and 1,000,000 tokens in all: give fewer blocks"),
        (["--pool-blocks", "1000000", "--output", "2000000"], "some 3 requests of 2,000,060 tokens"),
        (["--prompt", "1000000000000"], "the pool has 100: lower its budget or its length"),
    ],
)
def test_bad_usage_ends_with_one_clear_line_and_code_2(
    more: list[str], message: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)

    assert simulate(*more) == 2

    out, err = capsys.readouterr()
    assert message in err
    assert len(err.splitlines()) == 1
    assert out == ""
    assert list(tmp_path.iterdir()) == []


def test_a_chunk_beyond_the_prompt_is_the_whole_prompt(record: dict[str, Any], tmp_path: Path) -> None:
    for chunk in ("60", "1000000000000"):
        assert simulate("--chunk", chunk, "--json", str(tmp_path / chunk)) == 0

    whole, beyond = (json.loads((tmp_path / chunk).read_text()) for chunk in ("60", "1000000000000"))
    assert beyond["rows"] == whole["rows"]
    assert beyond["rows"] != record["rows"]


def test_rows_can_be_told_apart_in_60_columns(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    assert simulate("--mode", "native") == 0

    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= 60
    rows = [line.split() for line in out.splitlines() if line.startswith((" native", " vtoken"))]
    assert [(row[0], row[1], row[6]) for row in rows] == [("native", "40", "2"), ("vtoken", "22", "4")]
    assert len(next(line for line in out.splitlines() if line.startswith("    160")).rstrip()) >= 50  # the bar


def piped(**environment: str) -> subprocess.CompletedProcess[bytes]:
    program = f"import sys; from vtoken.cli import main; sys.exit(main({[*COMMAND.split(), '--policy', 'h2o']!r}))"
    return subprocess.run(
        [sys.executable, "-c", program], capture_output=True, check=False, env={**os.environ, **environment}
    )


def test_a_piped_run_says_nothing_on_stderr_and_an_ascii_terminal_gets_ascii() -> None:
    done = piped(PYTHONIOENCODING="ascii")

    assert (done.returncode, done.stderr) == (0, b"")
    assert b"#" in done.stdout
    assert b"?" not in done.stdout
    assert "█" in piped(PYTHONIOENCODING="utf-8").stdout.decode()


def test_an_unknown_mode_is_bad_usage() -> None:
    assert simulate("--mode", "fastest") == 2
