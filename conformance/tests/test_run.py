import pytest

from vtoken.errors import SpecError
from vtoken.paged_executor import PagedExecutor
from vtoken.reference import ReferenceExecutor
from vtoken_conformance.case import load_cases
from vtoken_conformance.mutants import MUTANTS
from vtoken_conformance.run import run_all, select_jobs

CASES = load_cases()


def names(patterns, num_seeds=3):
    return [job.name for job in select_jobs(CASES, patterns, num_seeds)]


def test_without_a_pattern_all_cases_and_seeds_run():
    assert names([]) == [
        *(case.name for case in CASES),
        *("crowd/16", "crowd/32", "random/0", "random/1", "random/2"),
    ]


def test_patterns_choose_among_cases_and_seeds():
    assert names(["recycle/*_order_of_the_queue", "random/*"]) == [
        "recycle/recycling_follows_the_order_of_the_queue",
        "random/0",
        "random/1",
        "random/2",
    ]


def test_a_seed_beyond_the_number_asked_for_can_be_named():
    assert names(["random/1700"]) == ["random/1700"]


def test_a_case_named_by_two_patterns_runs_once():
    assert names(["random/1", "random/[01]"]) == ["random/1", "random/0"]


def test_a_pattern_that_matches_nothing_names_the_nearest():
    with pytest.raises(
        SpecError, match="matches nothing: nearest are recycle/recycling_follows_the_order_of_the_queue"
    ):
        names(["recycle/recycling_folows_the_order"])
    with pytest.raises(SpecError, match=r"matches nothing: chapters are attention, crowd, fingerprint, .*, random, "):
        names(["zzz"])


def test_one_executor_serves_many_jobs_and_a_failed_one_is_replaced():
    made = []

    def make():
        made.append(MUTANTS["SortedQueue"]())
        return made[-1]

    jobs = select_jobs(CASES, ["token_table/*"], 0)
    rows = [row for row, _ in run_all(jobs, {"sorted": make})]
    failed = [row.case for row in rows if row.status == "failed"]
    assert "token_table/doomed_tokens_queue_in_the_given_order" in failed
    assert len(made) == len(failed) + 1
    assert len(rows) == len(jobs)


def test_a_failure_says_where_what_and_how_to_see_it_again():
    (job,) = select_jobs(CASES, ["token_table/a_kill_frees_no_block"], 0)
    ((row, failure),) = run_all([job], {"stale": MUTANTS["StaleMask"]})
    assert (row.case, row.executor, row.status, row.steps) == (job.name, "stale", "failed", 3)
    assert (failure.rule, failure.step, failure.op) == ("T-3", 3, "kill req=a positions=[0, 1, 2, 3]")
    assert (failure.expected, failure.got) == ("[4, 5, 6, 7]", "[0, 1, 2, 3, 4, 5, 6, 7]")
    assert failure.rerun == f"vtoken conformance --executor stale --case {job.name}"
    assert failure.traceback == ""


def test_an_executor_that_raises_is_an_error_with_its_traceback():
    class Crashing(ReferenceExecutor):
        def recycle(self, req_id, kv):
            raise ZeroDivisionError("slot / 0")

    jobs = select_jobs(CASES, ["recycle/recycling*", "fingerprint/golden*"], 0)
    results = list(run_all(jobs, {"crashing": Crashing}))
    (row, failure) = results[0]
    assert (row.status, failure.got) == ("error", "ZeroDivisionError: slot / 0")
    assert "in recycle" in failure.traceback
    assert all(row.status == "passed" for row, _ in results[1:])


def test_the_traceback_begins_where_the_executor_raised():
    class Crashing(ReferenceExecutor):
        def admit(self, req_id):
            raise SystemExit(3)

    class CrashingLate(ReferenceExecutor):
        def admit(self, req_id):
            super().admit(req_id)
            return self.nothing

    refused = select_jobs(CASES, ["requests/a_fork*", "token_table/*"], 0)
    for make, cause in ((Crashing, "SystemExit: 3"), (CrashingLate, "AttributeError: ")):
        for row, failure in run_all(refused, {"crashing": make}):
            assert row.status == "error"
            assert failure.got.startswith(cause)
            first_frame = failure.traceback.splitlines()[1]
            assert first_frame.endswith("in admit")
            assert "test_run.py" in first_frame
            assert "Refusal" not in failure.traceback


def test_an_error_of_allocate_is_told_as_it_is():
    class Unfinished(PagedExecutor):
        name = "unfinished"

    jobs = select_jobs(CASES, ["fingerprint/golden*", "recycle/*"], 0)
    results = list(run_all(jobs, {"unfinished": Unfinished}))
    assert len(results) == len(jobs)
    row, failure = results[0]
    assert (row.status, row.steps, failure.op) == ("error", 0, "allocate")
    assert failure.got.startswith("NotImplementedError")
    assert "in _make_store" in failure.traceback
    assert "_digest" not in failure.traceback


def test_an_executor_that_cannot_be_made_again_fails_the_rest_and_the_next_one_runs():
    made = []

    def make():
        if made:
            raise OSError("the device is lost")
        made.append(MUTANTS["SortedQueue"]())
        return made[0]

    jobs = select_jobs(CASES, ["token_table/doomed_tokens_queue*", "plans/*"], 0)
    results = list(run_all(jobs, {"once": make, "reference": ReferenceExecutor}))
    once = [(row.status, failure.got) for row, failure in results[1 : len(jobs)]]
    assert once == [("error", "OSError: the device is lost")] * (len(jobs) - 1)
    assert all(row.status == "passed" for row, _ in results[len(jobs) :])


def test_an_interrupt_ends_the_run():
    class Interrupted(ReferenceExecutor):
        def admit(self, req_id):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        list(run_all(select_jobs(CASES, ["recycle/*"], 0), {"interrupted": Interrupted}))


def test_executors_that_agree_have_one_fingerprint():
    jobs = select_jobs(CASES, ["plans/*"], 0)
    rows = [row for row, _ in run_all(jobs, {"one": ReferenceExecutor, "two": ReferenceExecutor})]
    by_case = {}
    for row in rows:
        by_case.setdefault(row.case, set()).add(row.fingerprint)
    assert {len(fingerprints) for fingerprints in by_case.values()} == {1}
    assert len({row.fingerprint for row in rows}) > len(jobs) // 2
