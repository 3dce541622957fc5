import pytest

from vtoken.errors import SpecError
from vtoken.reference import ReferenceExecutor
from vtoken.trace import TraceEvent, VictimTrace
from vtoken.victims import TraceVictims
from vtoken_conformance.mutants import MUTANTS
from vtoken_conformance.replay import load_trace_jobs
from vtoken_conformance.run import run_job

VARIANTS = ("naive", "lazy", "eager", "fenced")


@pytest.fixture
def trace_path(tmp_path):
    """Two requests: bulk kills after chunks of a prompt, then batches whose victims die one a step."""
    trace = VictimTrace({"policy": "by hand"})
    for key in (0, 1):
        trace.add(TraceEvent(key, 48, tuple(range(4 + key, 36)), (48,) * (32 - key)))
        trace.add(TraceEvent(key, 80, tuple(range(40, 60)), (80,) * 20))
        trace.add(TraceEvent(key, 96, tuple(range(60, 72)), tuple(range(96, 108))))
        trace.add(TraceEvent(key, 112, (72, 74, 76), (112, 113, 114)))
    path = tmp_path / "by_hand.jsonl"
    trace.save(path)
    return path


def test_a_trace_runs_in_every_variant_under_its_own_name(trace_path):
    jobs = load_trace_jobs(trace_path)
    assert [job.name for job in jobs] == [f"trace/by_hand/{variant}" for variant in VARIANTS]
    assert jobs[0].arguments == ("--trace", str(trace_path))


def test_every_executor_replays_a_trace(trace_path, any_executor):
    results = [run_job(job, any_executor.name, any_executor) for job in load_trace_jobs(trace_path)]
    assert [failure for _, failure in results if failure] == []


def test_the_variants_do_what_they_are_named_after(trace_path):
    class Counting(ReferenceExecutor):
        moves = recycled = 0

        def launch(self, plan):
            self.moves += len(plan.moves)
            return super().launch(plan)

        def recycle(self, req_id, kv):
            self.recycled += 1
            super().recycle(req_id, kv)

    counts = {}
    for job in load_trace_jobs(trace_path):
        executor = Counting()
        assert run_job(job, "counting", executor)[1] is None
        counts[job.variant] = (executor.moves > 0, executor.recycled)
    assert counts == {"naive": (False, 0), "lazy": (True, 0), "eager": (True, 30), "fenced": (True, 30)}


def test_a_broken_executor_fails_a_trace(trace_path):
    eager = load_trace_jobs(trace_path)[2]
    _, failure = run_job(eager, "broken", MUTANTS["RecycleAtCursor"]())
    assert failure.case == "trace/by_hand/eager"
    assert failure.what == "live positions of request 'request-0'"
    assert failure.op.startswith("pass of eager, call ")
    assert failure.rerun.endswith(f"--trace {trace_path}")


def test_survivors_are_compared_with_the_trace(trace_path, monkeypatch):
    """A scheduler that is told of the first event alone leaves later victims alive."""

    def first_event_of_each(trace):
        return TraceVictims(VictimTrace(trace.meta, {key: events[:1] for key, events in trace.events.items()}))

    monkeypatch.setattr("vtoken_conformance.replay.TraceVictims", first_event_of_each)
    _, failure = run_job(load_trace_jobs(trace_path)[0], "reference", ReferenceExecutor())
    assert (failure.rule, failure.what) == ("K-4", "survivors of 'request-0'")


def test_an_empty_trace_is_refused(tmp_path):
    path = tmp_path / "empty.jsonl"
    VictimTrace({"policy": "none"}).save(path)
    with pytest.raises(SpecError, match=r"empty\.jsonl: it holds no event with victims"):
        load_trace_jobs(path)


def test_events_without_victims_are_passed_over(trace_path, tmp_path):
    hollow = VictimTrace()
    hollow.add(TraceEvent(0, 8, (), ()))
    hollow.save(tmp_path / "hollow.jsonl")
    with pytest.raises(SpecError, match=r"hollow\.jsonl: it holds no event with victims: record a run that evicts"):
        load_trace_jobs(tmp_path / "hollow.jsonl")
    trace = VictimTrace.load(trace_path)
    trace.add(TraceEvent(7, 8, (), ()))
    trace.save(trace_path)
    assert [run_job(job, "reference", ReferenceExecutor())[1] for job in load_trace_jobs(trace_path)] == [None] * 4


def test_an_error_of_allocate_fails_a_trace_before_its_first_pass(trace_path):
    class Full(ReferenceExecutor):
        def allocate(self, spec):
            raise MemoryError("no room")

    row, failure = run_job(load_trace_jobs(trace_path)[0], "full", Full())
    assert (row.status, row.steps, failure.got) == ("error", 0, "MemoryError: no room")
    assert failure.op == "start of naive: allocate, admit"
