import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vtoken.errors import SpecError
from vtoken.trace import SCHEMA, TraceEvent, TraceWriter, VictimTrace

HEADER = json.dumps({"schema": SCHEMA})
EVENT = '{"trace_key":0,"at_computed":8,"chosen":[1,3],"died":[8,9]}'


def write(path: Path, *lines: str, end: str = "\n") -> Path:
    path.write_text("\n".join(lines) + end)
    return path


# -- events ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("chosen", "died", "message"),
    [
        ((1, 3), (8,), "trace event at 8: 2 victims, 1 deaths"),
        ((1, 8), (8, 9), "it chooses tokens that are not computed yet"),
        ((1, 3), (7, 8), "a victim dies before it is chosen"),
    ],
)
def test_an_impossible_event_is_refused(chosen: tuple[int, ...], died: tuple[int, ...], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        TraceEvent(0, 8, chosen, died)


def test_the_counts_of_one_request_never_go_back() -> None:
    trace = VictimTrace()
    trace.add(TraceEvent(0, 8, (1,), (8,)))
    trace.add(TraceEvent(1, 4, (1,), (4,)))
    trace.add(TraceEvent(0, 8, (2,), (8,)))
    with pytest.raises(SpecError, match="trace key 0: event at 7 comes after 8"):
        trace.add(TraceEvent(0, 7, (3,), (7,)))
    assert [event.chosen for event in trace.events[0]] == [(1,), (2,)]


# -- files -----------------------------------------------------------------------------------------------------------


def test_a_saved_trace_reads_back_the_same(tmp_path: Path) -> None:
    trace = VictimTrace({"policy": "random", "schema": SCHEMA})
    trace.add(TraceEvent(1, 8, (1, 3), (8, 9)))
    trace.add(TraceEvent(0, 4, (2,), (4,)))
    trace.save(tmp_path / "trace.jsonl")
    assert VictimTrace.load(tmp_path / "trace.jsonl") == trace


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 9), st.sets(st.integers(0, 8)))))
def test_any_trace_reads_back_the_same(
    tmp_path_factory: pytest.TempPathFactory, parts: list[tuple[int, int, set[int]]]
) -> None:
    trace = VictimTrace({"schema": SCHEMA})
    for key, count, victims in sorted(parts, key=lambda part: part[1]):
        chosen = tuple(victim for victim in victims if victim < count)
        trace.add(TraceEvent(key, count, chosen, tuple(count + i for i in range(len(chosen)))))
    path = tmp_path_factory.mktemp("trace") / "trace.jsonl"
    trace.save(path)
    assert VictimTrace.load(path) == trace


def test_a_file_begins_with_its_schema_and_has_one_event_a_line(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    with TraceWriter(path, {"seed": 7, "schema": "overruled"}) as writer:
        writer.write(TraceEvent(0, 8, (1, 3), (8, 9)))
    header, event = path.read_text().splitlines()
    assert json.loads(header) == {"seed": 7, "schema": "vtoken/victims/1"}
    assert event == EVENT


def test_an_event_is_on_the_disk_once_written(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    with TraceWriter(path, {}) as writer:
        writer.write(TraceEvent(0, 8, (1, 3), (8, 9)))
        assert path.read_text().endswith(EVENT + "\n")


def test_a_torn_last_line_is_left_out_and_reported(tmp_path: Path) -> None:
    path = write(tmp_path / "trace.jsonl", HEADER, EVENT, EVENT[:-5], end="")
    trace = VictimTrace.load(path)
    assert trace.events == {0: [TraceEvent(0, 8, (1, 3), (8, 9))]}
    assert trace.warnings == [f"{path}:3: torn last line left out ({len(EVENT) - 5} characters)"]


def test_a_whole_last_line_without_its_newline_counts(tmp_path: Path) -> None:
    trace = VictimTrace.load(write(tmp_path / "trace.jsonl", HEADER, EVENT, end=""))
    assert len(trace.events[0]) == 1
    assert trace.warnings == []


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([], "empty; a trace begins with a header line"),
        ([HEADER[:-3]], "trace.jsonl:1: not a JSON line"),
        (['{"schema": "vtoken/victims/2"}', EVENT], "schema 'vtoken/victims/2', this version reads 'vtoken/victims/1'"),
        ([EVENT], "schema None"),
        (["[]"], "schema None"),
        ([HEADER, EVENT[:-5], EVENT], "trace.jsonl:2: not a JSON line .*: the trace is damaged"),
        ([HEADER, EVENT[:-5]], "trace.jsonl:2: not a JSON line .*: the trace is damaged"),
        ([HEADER, '{"trace_key": 0, "at_computed": 8}'], "trace.jsonl:2: no trace event: chosen is missing: record"),
        ([HEADER, "[1, 2]"], r"trace.jsonl:2: no trace event: \[1, 2\] is no JSON object"),
        ([HEADER, EVENT.replace("[1,3]", '["1","3"]')], r"jsonl:2: no trace event: chosen\[0\] is '1', not an integer"),
        ([HEADER, EVENT.replace("[1,3]", "[1,-3]")], r"jsonl:2: .* chosen\[1\] is -3, not an integer of at least 0"),
        ([HEADER, EVENT.replace("[1,3]", "[true,3]")], r"jsonl:2: no trace event: chosen\[0\] is True, not an integer"),
        ([HEADER, EVENT.replace("[8,9]", "[8,9.5]")], r"jsonl:2: no trace event: died\[1\] is 9.5, not an integer"),
        ([HEADER, EVENT.replace("[1,3]", "1")], "jsonl:2: no trace event: chosen is 1, not a list"),
        ([HEADER, EVENT.replace('key":0', 'key":-1')], "jsonl:2: no trace event: trace_key is -1, not an integer"),
        (
            [HEADER, EVENT.replace('ted":8', 'ted":null')],
            "jsonl:2: no trace event: at_computed is None, not an",
        ),
        ([HEADER, EVENT.replace("[1,3]", f"[{'9' * 5000},3]"), EVENT], "jsonl:2: not a JSON line"),
        ([HEADER, EVENT.replace("[1,3]", "[1,8]")], "trace.jsonl:2: no trace event: .* not computed yet"),
        ([HEADER, EVENT, EVENT.replace("8", "7")], "trace.jsonl:3: no trace event: .* event at 7 comes after 8"),
    ],
)
def test_a_damaged_trace_is_refused_by_file_and_line(tmp_path: Path, lines: list[str], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        VictimTrace.load(write(tmp_path / "trace.jsonl", *lines))


def test_a_binary_file_is_refused_in_one_line(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_bytes(b"\x7fELF\x00\xff\xfe")
    with pytest.raises(SpecError, match=r"trace\.jsonl: no text \(.* byte 0xff .*\): give a victim trace"):
        VictimTrace.load(path)
