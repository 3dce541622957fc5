import json
import sys
from pathlib import Path
from typing import Any

import pytest

from vtoken.cli import main
from vtoken_bench.suites import kernels

pytest.importorskip("triton", reason="PyTorch's builds for CPUs leave Triton out")

import triton

from vtoken_torch.kernels import aot
from vtoken_torch.kernels.aot import MachineCode, Verdict

KEPT = Path(__file__).parents[1] / "results" / "kernels_aot.json"
DOCS = Path(__file__).parents[2] / "docs" / "torch.md"
CODE = MachineCode(112, 0, 0, 41_984, 33, 1, 0, 32)


def bench(*arguments: str) -> int:
    try:
        return main(["bench", "kernels", *arguments])
    except SystemExit as stop:
        return int(stop.code or 0)


@pytest.fixture
def judged(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Answers for the compiler."""

    def answer(*verdicts: Verdict) -> None:
        monkeypatch.setattr(aot, "judge_all", lambda keys, num_processes: iter(verdicts))

    return answer


def kept() -> dict[str, Any]:
    record: dict[str, Any] = json.loads(KEPT.read_text())
    return record


def test_the_kept_record_names_exactly_the_cases_that_there_are() -> None:
    rows = kept()["rows"]
    assert [(f"{row['kernel']}: {row['shape']}", row["arch"]) for row in rows] == [
        (key, f"sm_{arch}") for key in aot.aot_cases() for arch in aot.ARCHITECTURES
    ]
    controls = [case.breaks for case in aot.aot_cases().values() for _ in aot.ARCHITECTURES]
    assert [row["control"] for row in rows] == controls


def test_the_kept_record_is_good_and_in_form() -> None:
    record = kept()
    assert record["schema"] == kernels.SCHEMA
    assert record["triton"]
    for row in record["rows"]:
        assert row.keys() == {"kernel", "shape", "arch", *kernels._FIGURES, "control", "reasons", "passed"}
        assert row["passed"]
        assert bool(row["reasons"]) == (row["control"] is not None)
    assert record["summary"] == {
        "kernels": len({row["kernel"] for row in record["rows"]}),
        "compiled": len(record["rows"]),
        "controls": sum(row["control"] is not None for row in record["rows"]),
        "failed": 0,
    }


def test_the_table_in_the_docs_is_the_record_s() -> None:
    lines = DOCS.read_text().partition("| kernel, shape |")[2].partition("\n\n")[0].splitlines()[2:]
    rows = kept()["rows"]
    for name, *figures in (line.strip("| ").split(" | ") for line in lines):
        kernel, _, shape = name.replace(" (byte path)", "").partition(" ")
        same = [row for row in rows if row["kernel"] == f"{kernel}_kernel" and row["shape"].startswith(shape)]
        same = [row for row in same if row["shape"] == same[0]["shape"]]
        assert len(same) == len(aot.ARCHITECTURES), name
        each = [str(row["registers"]) for row in same]
        registers = "/".join(each if len(set(each)) > 1 else each[:1])
        shared = max(row["shared_bytes"] for row in same) / 1024
        least = [str(min(row[key] for row in same)) for key in ("wide_loads", "wide_stores", "tensor_core")]
        spills = str(max(row["spills"] for row in same))
        assert figures == [registers, spills, f"{shared:.1f}" if shared else "0", *least], name
    assert len(lines) > 10


@pytest.mark.parametrize("arch", [f"sm_{arch}" for arch in aot.ARCHITECTURES])
def test_without_logits_the_kernel_has_no_store_of_them_and_no_memory_for_them(arch: str) -> None:
    rows = {row["shape"]: row for row in kept()["rows"] if (row["kernel"], row["arch"]) == ("split_kernel", arch)}
    mass, plain = rows["bf16 32/8 D128 BS16"], rows["bf16 32/8 no logits"]
    assert plain["wide_stores"] < mass["wide_stores"]
    assert plain["shared_bytes"] < mass["shared_bytes"]
    assert plain["wide_loads"] == mass["wide_loads"]


def test_one_case_is_compiled_for_all_architectures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A negative control, so that the gate is seen to refuse; the record keeps what it found."""
    path = tmp_path / "kernels.json"
    assert bench("--only", "strides of 4", "--processes", "1", "--json", str(path)) == 0
    rows = json.loads(path.read_text())["rows"]
    if kept()["triton"] == triton.__version__:  # another compiles to other figures
        assert rows == [row for row in kept()["rows"] if row["shape"] == "strides of 4 bytes"]
    assert [row["arch"] for row in rows] == ["sm_80", "sm_90", "sm_100"]
    assert "refused" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("verdict", "found"),
    [
        (Verdict("k", "shape", 90, CODE, ("3 spills",), None), "k: shape on sm_90: 3 spills"),
        (Verdict("k", "shape", 90, None, ("does not compile: no",), None), "k: shape on sm_90: does not compile: no"),
        (Verdict("k", "shape", 90, CODE, (), "spills"), "to be refused for 'spills'; found: nothing"),
        (Verdict("k", "shape", 90, CODE, ("no 128-bit loads",), "spills"), "found: no 128-bit loads"),
    ],
)
def test_a_miss_is_named_and_ends_with_code_1(
    verdict: Verdict, found: str, judged: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    judged(verdict, Verdict("k", "another", 90, CODE, (), None))
    assert bench("--json", str(tmp_path / "kernels.json")) == 1
    out = capsys.readouterr().out
    assert found in out
    assert "FAILED" in out
    assert "1 of 2 are as they should be" in out
    assert json.loads((tmp_path / "kernels.json").read_text())["summary"]["failed"] == 1


def test_registers_stand_side_by_side_within_80_columns(
    judged: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    codes = [MachineCode(registers, 0, 0, 41_984, 33, 1, 0, 32) for registers in (112, 118, 255)]
    shape = "bf16 32/32 D128 BS16 abc"
    judged(*(Verdict("k", shape, arch, code, (), None) for arch, code in zip((80, 90, 100), codes, strict=True)))
    assert bench() == 0
    lines = capsys.readouterr().out.splitlines()
    (line,) = (line for line in lines if shape in line)
    assert line.split()[5:] == ["112/118/255", "0", "41.0", "33", "1", "0", "32", "good"]
    assert all(len(line.rstrip()) <= 80 for line in lines)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--only", "no such kernel"], "--only no such kernel: no case has that in its name; there are"),
        (["--processes", "0"], "'0' is no whole number of at least 1"),
        (["--json", "."], "is a folder"),
    ],
)
def test_bad_usage_is_named_and_ends_with_code_2(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench(*arguments) == 2
    assert message in capsys.readouterr().err


def test_where_triton_is_missing_the_line_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in [name for name in sys.modules if name.startswith("vtoken_torch.kernels")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "triton", None)
    assert bench() == 2
    assert "needs triton, which PyTorch's builds for CPUs leave out: pip install triton" in capsys.readouterr().err
