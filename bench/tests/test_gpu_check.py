"""The GPU check rehearsed on the CPU; that it can fail; that nothing is measured where there is nothing to measure."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from vtoken_bench.gpu_check import __main__ as command
from vtoken_bench.gpu_check.batch import Shape, make_batch
from vtoken_bench.gpu_check.conduct import conduct
from vtoken_bench.gpu_check.ground import Ground, worst
from vtoken_bench.gpu_check.report import make_record, make_table
from vtoken_bench.gpu_check.step import STEPS, Step
from vtoken_bench.gpu_check.worker import Outcome, run_step
from vtoken_bench.record import Row
from vtoken_bench.timing import Spread

torch = pytest.importorskip("torch")
pytest.importorskip("triton", reason="PyTorch's builds for CPUs leave Triton out")

SCRIPT = Path(__file__).parents[2] / "scripts" / "gpu_check.sh"
NO_GPU = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")


def shell(*arguments, **environment):
    return subprocess.run(
        ["bash", str(SCRIPT), *arguments],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


@pytest.mark.slow
def test_the_dry_run_walks_through_every_step_and_measures_nothing(tmp_path):
    pytest.importorskip("jax")
    done = shell("--dry-run", OUT=str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    said = dict(re.findall(r"^gpu_check: (.*): (rehearsed|FAILED|OVERRAN|left out)$", done.stderr, re.M))
    assert list(said) == [step.name for step in STEPS]
    assert {name for name, status in said.items() if status != "rehearsed"} <= {"executors"}
    assert "nothing was measured" in done.stdout
    assert not re.search(r"\d (us|GB/s|ratio|s)\b", done.stdout)
    assert list(tmp_path.iterdir()) == []


MUTANTS = {
    "decode": "check_decode, 'token_mass', lambda *args, **kwargs: None",
    "move": "check_copies.move, 'move_tokens', lambda *args, **kwargs: None",
    "fingerprint": "check_copies.fingerprint, 'SALTS', (0, 1)",
    "streams": "CUDACopyEngine, 'launch', lambda self, src, dst, after: launch(self, dst, src, after)",
    "graph": "check_graph, 'graphed', lambda work, ground: work() or (lambda: None)",
    "jax decode": "check_jax, 'paged_decode', lambda q, k, v, *rest, **static: decode(q, k, k, *rest, **static)",
    "conformance jax": "JaxKVStore, 'write', lambda store, slots, places, kv: write(store, slots, places, kv[::-1])",
    "engine": "kernel_segment, 'paged_decode', lambda *args, out, **kwargs: out.zero_()",
    "time decode": "time_decode, 'paged_decode', lambda *args, out, **kwargs: out.zero_()",
    "time copy": "time_moves, 'move_tokens', lambda *args, **kwargs: None",
}
PROGRAM = f"""
import os, sys
os.environ.update(TRITON_INTERPRET="1", OMP_NUM_THREADS="1")
from vtoken_bench.gpu_check import check_copies, check_decode, check_graph, check_jax, time_decode, time_moves
from vtoken_bench.gpu_check.step import STEPS
from vtoken_bench.gpu_check.worker import run_step
from vtoken_torch.copy_engine import CUDACopyEngine
from vtoken_torch.hf import kernel_segment
from vtoken_jax.kv_store import JaxKVStore
launch, decode, write = CUDACopyEngine.launch, check_jax.paged_decode, JaxKVStore.write
for name, mutant in {MUTANTS!r}.items():
    kept = [(owner, dict(vars(owner))) for owner in
            (check_decode, check_copies.move, check_copies.fingerprint, CUDACopyEngine, check_graph, check_jax,
             JaxKVStore, kernel_segment, time_decode, time_moves)]
    eval(f"setattr({{mutant}})")
    outcome = run_step(next(step for step in STEPS if step.name == name), True)
    print(f"{{name}}|{{outcome.status}}|{{outcome.findings[:1]}}")
    for owner, names in kept:
        for key, value in names.items():
            if vars(owner)[key] is not value:
                setattr(owner, key, value)
"""


def test_a_broken_kernel_engine_or_table_fails_its_step():
    pytest.importorskip("jax")
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    said = dict(line.split("|")[:2] for line in done.stdout.splitlines())
    assert said == dict.fromkeys(MUTANTS, "FAILED"), done.stdout


# -- without a GPU -----------------------------------------------------------------------------------------------------


@NO_GPU
def test_the_script_says_what_to_do_without_a_gpu(tmp_path):
    done = shell(PATH=f"{tmp_path}:/usr/bin:/bin", OUT=str(tmp_path))
    assert done.returncode == 2
    assert "NVIDIA GPU" in done.stderr
    assert "--dry-run" in done.stderr
    assert list(tmp_path.iterdir()) == []


@NO_GPU
@pytest.mark.parametrize(
    ("cuda", "remedy"), [(None, "VTOKEN_DEVICE=cuda bash scripts/setup.sh"), ("13.0", "nvidia-smi")]
)
def test_so_does_the_command(tmp_path, capsys, monkeypatch, cuda, remedy):
    monkeypatch.setattr(torch.version, "cuda", cuda)
    assert command.main(["--out", str(tmp_path / "gpu")]) == 2
    assert remedy in capsys.readouterr().err
    assert not (tmp_path / "gpu").exists()


# -- steps that go wrong do not stop the others ------------------------------------------------------------------------

FAKE_STEPS = """
import os, time
from vtoken_bench.gpu_check.ground import LeftOut

def good(ground):
    ground.check("it holds", True)

def wrong(ground):
    ground.check("it holds", False, "1 of 2")

def raises(ground):
    raise RuntimeError("an illegal memory access")

def dies(ground):
    os.write(2, b"last words")
    os._exit(3)

def overruns(ground):
    time.sleep(60)

def leaves_out(ground):
    raise LeftOut("nothing to run it on")

def empty(ground):
    pass
"""


@pytest.fixture
def fake(tmp_path, monkeypatch):
    (tmp_path / "fake_gpu_steps.py").write_text(FAKE_STEPS)
    monkeypatch.syspath_prepend(tmp_path)
    return lambda name, **options: Step(name, "a fake", f"fake_gpu_steps:{name}", **options)


def test_no_step_stops_the_others(fake, tmp_path):
    steps = [fake("dies"), fake("overruns", limit_s=0.3), fake("good"), fake("good", group="jax")]
    outcomes = list(conduct(steps, True, tmp_path / "log"))
    assert [outcome.step for outcome in outcomes] == steps
    assert [outcome.status for outcome in outcomes] == ["FAILED", "OVERRAN", "rehearsed", "rehearsed"]
    assert outcomes[0].findings == ["its process ended with 3: last words"]


def test_what_is_left_when_time_is_up_overran(fake, tmp_path):
    (outcome,) = conduct([fake("good")], True, tmp_path / "log", total_s=0.0)
    assert (outcome.status, outcome.findings) == ("OVERRAN", ["no time was left"])


@pytest.mark.parametrize(
    ("name", "status", "findings"),
    [
        ("good", "good", []),
        ("wrong", "FAILED", ["it holds: 1 of 2"]),
        ("raises", "FAILED", ["RuntimeError: an illegal memory access"]),
        ("leaves_out", "left out", ()),
        ("empty", "FAILED", ["checked and measured nothing"]),
    ],
)
def test_what_becomes_of_a_step(fake, name, status, findings):
    outcome = run_step(fake(name), is_dry=False)
    assert (outcome.status, outcome.findings) == (status, findings)
    assert outcome.is_bad == (status == "FAILED")


# -- parts -------------------------------------------------------------------------------------------------------------


def test_a_rehearsal_refuses_figures_and_runs_each_work_once():
    ground, calls = Ground(is_dry=True), []
    assert ground.time({"a": lambda: calls.append("a"), "b": lambda: calls.append("b")}, lambda work: 1.0) == {}
    assert calls == ["a", "b"]
    with pytest.raises(AssertionError, match="measures nothing"):
        ground.figure("a", "us", Spread.of([1.0]))


def test_times_come_with_rates_whose_range_is_turned_round():
    ground, times = Ground(is_dry=False), iter([9.0, 1.0, 2.0, 4.0])
    taken = ground.time({"copy": lambda: None}, lambda work: next(times), num_bytes=8000, repeats=3, moves=5)
    assert taken["copy"] == Spread(2.0, 1.0, 4.0)
    assert ground.figures == [
        Row("copy", "us", Spread(2.0, 1.0, 4.0), params={"moves": 5}),
        Row("copy", "GB/s", Spread(4.0, 2.0, 8.0), params={"moves": 5}),
    ]


def test_the_worst_error_counts_nan_and_misplaced_infinity_as_infinite():
    wanted = np.array([2.0, -np.inf, 0.0])
    assert worst(np.array([2.5, -np.inf, 0.0]), wanted) == 0.25
    assert worst(np.array([np.nan, -np.inf, 0.0]), wanted) == np.inf
    assert worst(np.array([2.0, 0.0, 0.0]), wanted) == np.inf
    assert worst(np.array([2.0]), wanted) == np.inf


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a_batch_is_exact_in_its_dtype_and_poisoned_where_dead(dtype):
    batch = make_batch(Shape(4, 2, 16, 16, 3), dtype)
    kept = torch.from_numpy(batch.kv).to(getattr(torch, dtype)).float().numpy()
    np.testing.assert_array_equal(kept, batch.kv)
    live = {(b, s) for r, i, s in np.argwhere(batch.alive).tolist() for b in [int(batch.table[r, i])]}
    finite = {tuple(place) for place in np.argwhere(np.isfinite(batch.kv[0, ..., 0, 0])).tolist()}
    assert live == finite
    out, lse, mass = batch.expected()
    assert not out[[1, 2]].any()
    assert np.isneginf(lse[[1, 2]]).all()
    np.testing.assert_allclose(mass.sum(1), [4, 0, 0, 4, 4])


def test_record_and_table_hold_every_figure_and_finding():
    row = Row("move, 1 launch", "GB/s", Spread(3000.0, 2900.0, 3100.0), params={"moves": 1024})
    outcomes = [
        Outcome(STEPS[0], "good", 3, seconds=1.5),
        Outcome(STEPS[1], "FAILED", 2, ["moved bit for bit: no"], [row], ["without a library"], 2.5),
        Outcome(STEPS[-1], "left out", notes=["no suite"]),
    ]
    record = json.loads(json.dumps(make_record(outcomes)))
    assert record["summary"] == {"steps": 3, "checks": 5, "failed": ["move"], "left_out": ["executors"]}
    assert record["rows"][1]["figures"] == [row.as_record() | {"spread": [2900.0, 3100.0]}]
    console = Console(width=140)
    with console.capture() as text:
        console.print(make_table("a title", outcomes))
    for piece in ("FAILED", "moved bit for bit: no", "3000 GB/s", "moves 1,024", "without a library", "no suite"):
        assert piece in text.get()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_quick_checks_pass_on_a_gpu(tmp_path):
    steps = ("move", "fingerprint", "streams", "graph")
    assert command.main(["--out", str(tmp_path), *(part for step in steps for part in ("--step", step))]) == 0
    record = json.loads((tmp_path / "partial.json").read_text())
    assert [row["status"] for row in record["rows"]] == ["good"] * len(steps)
