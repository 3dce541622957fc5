import json
from typing import Any

import pytest
from rich.console import Console

from vtoken.cli import main
from vtoken.invariants import check_counts, check_unique_mapping
from vtoken_bench import spec_costs
from vtoken_bench.record import Row, suite_record, suite_table
from vtoken_bench.spec_costs import Wear, World, bytes_per_token
from vtoken_bench.suites import spec, suites
from vtoken_bench.timing import Spread


def bench(*arguments: str) -> int:
    try:
        return main(["bench", *arguments])
    except SystemExit as stop:
        return int(stop.code or 0)


def check_row(tokens: int, mode: str, value: float) -> Row:
    return Row("check_us_per_request", "us", Spread(value, value, value), 2, {"tokens": tokens, "mode": mode})


@pytest.fixture(scope="module")
def record(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    path = tmp_path_factory.mktemp("spec") / "spec.json"
    assert bench("spec", "--requests", "2", "--repeats", "2", "--json", str(path)) in (
        0,
        1,
    )  # clocks are not judged here
    loaded: dict[str, Any] = json.loads(path.read_text())
    return loaded


def test_every_cost_of_the_design_has_its_rows(record: dict[str, Any]) -> None:
    rows = {(row["name"], *row["params"].values()): row for row in record["rows"]}

    assert rows.keys() == {
        *(("check_us_per_request", tokens, mode) for tokens in (1024, 16384, 131072) for mode in ("eager", "lazy")),
        ("plan_us_per_move", "fill"),
        ("plan_us_per_move", "evacuate"),
        *((name, batch) for name in ("evict_us", "append_us") for batch in (256, 1)),
        ("bytes_per_token",),
    }
    bounds = {name: row["bound"] for (name, *_), row in rows.items() if row["params"] not in ({"batch": 1},)}
    assert bounds == {
        "check_us_per_request": 2,
        "plan_us_per_move": 2,
        "evict_us": 1,
        "append_us": 0.5,
        "bytes_per_token": 16,
    }


def test_a_row_holds_median_range_and_verdict(record: dict[str, Any]) -> None:
    for row in record["rows"]:
        low, high = row["spread"]
        assert 0 < low <= row["value"] <= high
        assert row["within"] == (row["value"] <= row["bound"])
        assert row["unit"] in ("us", "bytes")


def test_the_summary_says_how_the_check_grows_and_what_missed_its_bound(record: dict[str, Any]) -> None:
    summary = record["summary"]

    assert record["schema"] == "vtoken/bench-spec/1"
    assert record["environment"]["cpu"]
    assert summary["check_grows"] == (summary["check_growth"] > summary["check_growth_limit"] == 3)
    assert summary["within_bounds"] == (not summary["missed"]) == all(row["within"] for row in record["rows"])


def test_a_missed_bound_is_named_with_its_parameters() -> None:
    rows = [check_row(1024, "lazy", 2.5), check_row(16384, "lazy", 1.5)]

    summary = suite_record("schema/1", rows, {"more": 1})["summary"]
    assert summary == {"within_bounds": False, "missed": ["check_us_per_request[tokens=1024, mode=lazy]"], "more": 1}


@pytest.mark.parametrize(("longest", "code"), [(2.9, 0), (3.1, 1)])
def test_only_a_check_that_grows_with_length_fails_the_suite(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], longest: float, code: int
) -> None:
    rows = [
        check_row(1024, "eager", 1),
        check_row(131072, "eager", 1),
        check_row(131072, "lazy", longest),
        check_row(1024, "lazy", 1),
        Row("evict_us", "us", Spread(9, 9, 9), bound=1, params={"batch": 256}),
    ]
    monkeypatch.setattr(spec, "_measured", lambda *_: rows)

    assert bench("spec") == code
    assert ("it grows with length" in capsys.readouterr().out) == bool(code)


def test_memory_counts_every_array_of_the_table() -> None:
    # State 1 byte, place and position 4 each, a word of 8 bytes for 16 slots; lists and spare room on top.
    assert 9.5 < bytes_per_token(2, 16384) < 16


def test_half_of_a_worlds_tokens_are_dead_and_it_is_sound() -> None:
    world = World(num_requests=3, num_tokens=100, block_size=4)

    assert [table.num_live_tokens for table in world.tables] == [50] * 3
    assert world.pool.num_free == world.pool.num_held == 75
    tables = {table.req_id: table for table in world.tables}
    check_unique_mapping(tables, world.pool)
    for table in world.tables:
        check_counts(table)


def test_a_worn_world_is_replaced_before_it_runs_out() -> None:
    wear = Wear(num_requests=2, num_tokens=64)

    for _ in range(10):  # 32 live tokens last for three batches, 8 free blocks for one
        assert wear.evict_us(10) > 0
        assert wear.append_us(48) > 0
        assert wear.evict_us(1) > 0
        assert wear.append_us(1) > 0


def test_evictions_and_appends_are_counted_for_each_token(monkeypatch: pytest.MonkeyPatch) -> None:
    wear = Wear(num_requests=2, num_tokens=64)

    def one_call_is_a_hundred_us(work: Any) -> float:
        work()
        return 100

    monkeypatch.setattr(spec_costs, "cpu_us", one_call_is_a_hundred_us)
    before = [table.num_computed_tokens for table in wear._world.tables]

    assert wear.append_us(5) == 100 / (2 * 5)
    assert wear.evict_us(5) == 100 / (2 * 5)
    assert wear.evict_us(1) == 100 / 2
    assert [table.num_computed_tokens - old for table, old in zip(wear._world.tables, before, strict=True)] == [5, 5]
    assert [table.num_live_tokens for table in wear._world.tables] == [32 + 0 + 5 - 6, 32 + 1 + 5 - 6]


def test_every_module_of_the_package_is_a_suite_with_a_line_of_help() -> None:
    assert suites()["spec"] is spec.command
    assert all(suite.help for suite in suites().values())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "SUITE"),
        (["spek"], "invalid choice: 'spek'"),
        (["spec", "--repeats", "0"], "--repeats 0: give at least 1"),
        (["spec", "--requests", "-1"], "--requests -1: give at least 1"),
        (["spec", "--json", "."], "is a folder"),
    ],
)
def test_bad_usage_is_named_and_ends_with_code_2(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench(*arguments) == 2
    assert message in capsys.readouterr().err


def test_rows_can_be_told_apart_in_60_columns() -> None:
    rows = [check_row(tokens, mode, 0.123) for tokens in (1024, 131072) for mode in ("eager", "lazy")]
    console = Console(width=60)
    with console.capture() as capture:
        console.print(suite_table("costs", rows))
    shown = capture.get()

    for at in ("tokens 1,024, eager", "tokens 1,024, lazy", "tokens 131,072, eager", "tokens 131,072, lazy"):
        (line,) = (line for line in shown.splitlines() if at in line)
        assert line.split()[-1] == "2"
