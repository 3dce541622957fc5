"""Both files of a real run: valid while it runs and after, in order, and in step with the engine's counters."""

import json
import math

import pytest

from vtoken.errors import SpecError

SETTINGS = {"policy": "random", "kv_budget": 60, "interval": 8, "when": "always"}
STATES = {"queued", "running", "preempted"}


def read(path):
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    trace = json.loads(path.with_suffix(".perfetto.json").read_text(), parse_constant=_refuse_constant)
    check_format(trace)
    return lines, trace


def _refuse_constant(name):
    raise AssertionError(f"{name} is no JSON")


REQUIRED = {  # Trace Event Format: by phase, the keys beside ph, name and pid
    "M": {"args": dict},
    "C": {"ts": float, "args": dict},
    **{phase: {"ts": float, "cat": str, "id": str, "tid": int} for phase in "bne"},
}


def check_format(trace):
    """By the rules of the Trace Event Format, JSON array form: keys, types, order, nesting.

    Returns the slices that are still open, by (cat, id).
    """
    assert trace[0]["ph"] == "M"
    assert trace[0]["name"] == "process_name"
    assert isinstance(trace[0]["args"]["name"], str)
    last, open_slices = 0.0, {}
    for event in trace:
        assert isinstance(event["name"], str)
        assert event["name"]
        assert isinstance(event["pid"], int)
        for key, kind in REQUIRED[event["ph"]].items():
            assert isinstance(event[key], kind), event
        assert isinstance(event.get("args", {}), dict)
        if event["ph"] == "M":
            continue
        assert event["ts"] >= last, "out of order"
        last = event["ts"]
        assert math.isfinite(last)
        if event["ph"] == "C":
            assert event["args"], "a counter without a series"
            assert all(type(value) in (int, float) and math.isfinite(value) for value in event["args"].values()), event
        else:  # slices of one cat and id nest: begun before, ended last begun first, by name
            begun = open_slices.setdefault((event["cat"], event["id"]), [])
            if event["ph"] == "b":
                begun.append(event["name"])
            elif event["ph"] == "e":
                assert begun.pop() == event["name"]
            else:
                assert begun, "an instant outside of its request"
    return open_slices


def test_a_run_with_preemptions_and_aborts_is_told_in_order_and_in_full(world, tokens, tmp_path):
    path = tmp_path / "run.jsonl"
    with world(
        {**SETTINGS, "timeline": str(path)}, num_blocks=10, max_model_len=256, max_num_batched_tokens=128
    ) as engine:
        for count in (60, 100, 130, 90, 140, 110):
            engine.submit(tokens(count), 60, **({"vtoken_off": 1} if count == 60 else {}))
        engine.submit(tokens(70), 5)
        engine.run(abort_at={3: 6, 40: 1})  # the last one before it ever ran
        counters, evicted = engine.scheduler.vtoken.counters, engine.scheduler.vtoken.counters.num_evicted_tokens
        token_bytes = 2 * 2 * 2 * 32 * 4
        moved, pool = engine.runner.vtoken.num_moved_tokens, len(engine.pool.blocks) - 1
        readings = engine.scheduler.parts[-1]._readings
        planner_us, num_evicting_preemptions = readings.planning.seconds * 1e6, readings.num_evicting_preemptions
        assert engine.counts["preemptions"]
        assert engine.counts["aborts"] == 2
        num_passes = engine.counts["steps"]
    lines, trace = read(path)
    start, steps = lines[0], [line for line in lines if line["kind"] == "step"]
    assert start["kind"] == "start"
    assert start["schema"] == "vtoken/timeline/1"
    assert (start["pool_blocks"], start["token_bytes"]) == (pool, token_bytes)
    assert start["config"]["kv_budget"] == 60
    times = [line["t"] for line in lines]
    assert times == sorted(times)
    assert [step["step"] for step in steps] == list(range(num_passes))
    for step in steps:
        assert step["held"] + step["free"] + step["in_flight"] == pool
        assert 0 <= step["fragmentation"] <= 1
        assert step["moved_bytes"] == step["moved_tokens"] * token_bytes
    assert sum(step["evicted"] for step in steps) == evicted > 0
    assert sum(step["recycled"] for step in steps) == counters.num_recycled_tokens > 0
    assert sum(step["moved_tokens"] for step in steps) == moved > 0
    assert sum(step["planner_us"] for step in steps) == pytest.approx(planner_us, rel=0.01, abs=len(steps))
    assert max(step["waiting"] for step in steps) > 0
    check_requests([line for line in lines if line["kind"] == "request"], engine)
    assert 0 < num_evicting_preemptions <= sum(line.get("event") == "preemption" for line in lines)
    assert not any(step["in_flight"] or step["event_wait_us"] for step in steps)
    check_trace(trace, len(steps))


def check_requests(events, engine):
    """Each request's events make sense one after another."""
    told = {}
    for event in events:
        told.setdefault(event["req_id"], []).append(event["event"])
    assert sorted(int(req_id.split("-")[0]) for req_id in told) == list(engine.outcomes)
    for req_id, names in told.items():
        key = int(req_id.split("-")[0])
        assert (names[0], names[-1]) == ("arrival", "end"), names
        lifecycle = [name for name in names if name not in ("trigger", "commit")]
        if key == 6:
            assert lifecycle == ["arrival", "end"]
            continue
        assert lifecycle[1] == "admission"
        moves = lifecycle[2:-1]
        assert moves == ["preemption", "readmission"] * (len(moves) // 2) + ["preemption"] * (len(moves) % 2)
        touched = any(epoch.deaths for epoch in engine.outcomes[key].epochs)
        assert names.count("trigger") == touched == (key != 0)
        if "commit" in names:
            assert names.index("admission") < names.index("trigger") <= names.index("commit")
    flat = [name for names in told.values() for name in names]
    assert flat.count("preemption") >= engine.counts["preemptions"] > 0
    assert flat.count("readmission") > 0


def check_trace(trace, num_steps):
    """Every slice is closed; there is one counter of each kind for each step."""
    slices = check_format(trace)
    assert slices
    assert not any(slices.values())
    counters = [event["name"] for event in trace if event["ph"] == "C"]
    assert {name: counters.count(name) for name in counters} == dict.fromkeys(counters, num_steps)
    assert {"blocks", "fragmentation", "copied bytes", "requests"} <= set(counters)


def test_both_files_are_whole_while_the_engine_runs_and_without_an_orderly_end(world, tokens, tmp_path):
    path = tmp_path / "run.jsonl"
    with world({**SETTINGS, "timeline": str(path)}) as engine:
        assert len(read(path)[0]) == 1
        timeline = engine.scheduler.parts[-1]
        engine.submit(tokens(100), 30)
        for _ in range(20):
            timeline._flushed = -10.0  # a second is long over
            engine.step()
            lines, trace = read(path)
            counters = [event for event in trace if event["ph"] == "C"]
            num_steps = sum(line["kind"] == "step" for line in lines)
        assert num_steps == 20
        assert len(counters) == 20 * 7
        before = path.read_text()
        engine.step()
        assert path.read_text() == before  # kept for the next flush
        engine.run()
        engine.scheduler.schedule()  # a server's engine makes one more pass, and idle it flushes
        assert read(path)[0][-1]["step"] == engine.counts["steps"] + 21
        engine.scheduler.parts.remove(timeline)  # never closed


def test_a_place_that_cannot_be_written_is_refused_at_start(world, tmp_path):
    with pytest.raises(SpecError, match=r"nowhere.*: no such folder"):
        world({**SETTINGS, "timeline": str(tmp_path / "nowhere" / "run.jsonl")})
    (tmp_path / "run.perfetto.json").mkdir()
    with pytest.raises(SpecError, match=r"run\.perfetto\.json is a folder"):
        world({**SETTINGS, "timeline": str(tmp_path / "run.jsonl")})


def test_a_disk_that_fills_up_ends_the_timeline_and_not_the_engine(world, tokens, reference, tmp_path):
    path = tmp_path / "run.jsonl"
    path.symlink_to("/dev/full")
    with world({**SETTINGS, "timeline": str(path)}) as engine:
        assert engine.scheduler.parts[-1]._files is None
        engine.submit(tokens(100), 20)
        engine.run()
        engine.assert_exact(reference)


def test_copies_on_a_stream_of_their_own_are_waited_for(world, tokens, tmp_path, monkeypatch):
    from test_copy_stream import BUSY, LaggingDevice

    from vtoken_torch.vllm_plugin.copy_streams import OWN_STREAMS

    monkeypatch.setitem(OWN_STREAMS, "cpu", LaggingDevice)
    path = tmp_path / "run.jsonl"
    with world({**BUSY, "timeline": str(path)}, num_blocks=19) as engine:
        for length in (100, 200, 64):
            engine.submit(tokens(length), 50)
        engine.run()
    steps = [line for line in read(path)[0] if line["kind"] == "step"]
    waited = [step["event_wait_us"] for step in steps]
    assert max(waited) > 0
    assert waited[0] == 0
    assert max(step["in_flight"] for step in steps) > 0
    assert all(step["held"] + step["free"] + step["in_flight"] == 18 for step in steps)
