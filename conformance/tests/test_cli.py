import json
import re
import subprocess
import sys

import pytest

from vtoken.cli import Command, main
from vtoken.trace import TraceEvent, VictimTrace
from vtoken_conformance.cli import command


def run(*arguments):
    return main(["conformance", *arguments])


def test_it_is_a_command_whose_import_is_light():
    assert isinstance(command, Command)
    code = (
        "import sys, vtoken_conformance.cli; print([m for m in ('numpy', 'rich', 'torch', 'jax') if m in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "[]"


def test_a_good_run_prints_one_table_and_returns_0(capsys):
    assert run("--executor", "reference", "--case", "recycle/*", "--case", "random/3") == 0
    out = capsys.readouterr().out
    assert "cases passed" in out
    assert "recycle" in out
    assert "FAILED" not in out
    assert out.splitlines()[-1].endswith(" passed, 0 failed")


def test_a_failed_run_prints_case_rule_step_and_command_and_returns_1(capsys):
    name = "vtoken_conformance.mutants.executors:SortedQueue"
    assert run("--executor", name, "--case", "token_table/doomed*") == 1
    out = capsys.readouterr().out
    case = "token_table/doomed_tokens_queue_in_the_given_order"
    assert f"FAILED {case} on {name}" in out
    assert "rule      T-4 of SPEC.md" in out
    assert "step      3: doom req=a positions=[5, 1]" in out
    assert "expected  [5, 1]" in out
    assert "got       [1, 5]" in out
    assert f"rerun     vtoken conformance --executor {name} --case {case}" in out
    assert "Traceback" not in out


def test_the_json_record_has_its_schema_and_is_written_whole(tmp_path, capsys):
    path = tmp_path / "result.json"
    run("--executor", "reference", "--case", "plans/fill_*", "--seeds", "0", "--json", str(path))
    record = json.loads(path.read_text())
    assert record["schema"] == "vtoken/conformance/1"
    assert record["environment"]["packages"]["vtoken"]
    assert set(record["rows"][0]) == {"case", "executor", "status", "steps", "fingerprint"}
    assert record["summary"] == {
        "cases": len(record["rows"]),
        "passed": len(record["rows"]),
        "failed": 0,
        "executors": ["reference"],
    }
    assert set(record) == {"schema", "environment", "rows", "summary"}
    assert [entry.name for entry in path.parent.iterdir()] == ["result.json"]


def test_failures_stand_in_the_json_record_too(tmp_path, capsys):
    path = tmp_path / "result.json"
    executor = "vtoken_conformance.mutants.executors:EarlyFree"
    assert run("--executor", executor, "--executor", "reference", "--case", "plans/fenced*", "--json", str(path)) == 1
    record = json.loads(path.read_text())
    assert {row["status"] for row in record["rows"] if row["executor"] == "reference"} == {"passed"}
    assert record["summary"]["failed"] == len(record["failures"]) > 0
    assert record["failures"][0]["rule"] == "R-7"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--executor", "torhc"], "unknown executor 'torhc': did you mean 'torch'?"),
        (["--executor", "no_such_module:Executor"], "No module named 'no_such_module': give MODULE:CLASS"),
        (["--executor", "vtoken.reference:Nothing"], "give MODULE:CLASS"),
        (["--executor", "vtoken.plugins:EXECUTORS"], "is no class: give MODULE:CLASS"),
        (
            ["--case", "recycle/recycling_folows_the_order"],
            "nearest are recycle/recycling_follows_the_order_of_the_queue",
        ),
        (["--seeds", "-1"], "--seeds -1: give 0 or more"),
        (["--executor", "vllmm"], "unknown executor 'vllmm': did you mean 'vllm'?"),
        (["--executor", "your_module"], "(one of your own is named as MODULE:CLASS)"),
        (
            ["--trace", "no/such.jsonl"],
            "--trace no/such.jsonl: No such file or directory: name a file that a recorded run wrote",
        ),
    ],
)
def test_bad_usage_is_one_line_and_returns_2(arguments, message, capsys):
    assert run("--executor", "reference", *arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("vtoken conformance: ")
    assert message in captured.err
    assert captured.err.count("\n") == 1


def test_an_executor_without_its_extra_is_a_failed_selection(monkeypatch, capsys):
    from vtoken.errors import SpecError

    def get_plugin(group, name):
        raise SpecError(f"executor {name!r} does not load: it needs torch: pip install 'vtoken[torch]'")

    monkeypatch.setattr("vtoken_conformance.selection.get_plugin", get_plugin)
    assert run("--executor", "torch") == 2
    assert "pip install 'vtoken[torch]'" in capsys.readouterr().err


def test_without_a_choice_all_executors_that_load_run_and_the_others_are_named(monkeypatch, capsys):
    from vtoken.errors import SpecError
    from vtoken.reference import ReferenceExecutor

    monkeypatch.setattr(
        "vtoken_conformance.selection.load_plugins",
        lambda group: ({"reference": ReferenceExecutor}, {"jax": SpecError("it needs jax: pip install 'vtoken[jax]'")}),
    )
    assert run("--case", "recycle/*") == 0
    assert "without executor 'jax': it needs jax: pip install 'vtoken[jax]'" in capsys.readouterr().err


def test_a_random_program_can_be_run_again_by_name(capsys):
    assert run("--executor", "reference", "--case", "random/123") == 0
    assert "1 cases, 1 passed, 0 failed" in capsys.readouterr().out


def test_nothing_is_written_for_bad_usage(tmp_path, capsys):
    path = tmp_path / "result.json"
    assert run("--executor", "reference", "--case", "nothing_like_it", "--json", str(path)) == 2
    assert list(tmp_path.iterdir()) == []


def test_a_trace_runs_alone_in_all_variants_and_a_torn_line_is_told(tmp_path, capsys):
    path = tmp_path / "torn.jsonl"
    trace = VictimTrace({"policy": "by hand"})
    trace.add(TraceEvent(0, 40, tuple(range(4, 24)), (40,) * 20))
    trace.save(path)
    path.write_text(path.read_text() + '{"trace_key": 0, "at_comp')
    assert run("--executor", "reference", "--trace", str(path)) == 0
    captured = capsys.readouterr()
    assert "4 cases, 4 passed, 0 failed" in captured.out
    assert "torn last line left out" in captured.err


def test_the_help_of_a_trace_names_the_variants_that_run(capsys):
    from vtoken_conformance.replay import _VARIANTS

    with pytest.raises(SystemExit):
        run("--help")
    text = re.sub(r"\s+", " ", capsys.readouterr().out)
    assert f"in the variants {', '.join([*_VARIANTS][:-1])} and {[*_VARIANTS][-1]}; without --case" in text


def test_an_executor_that_exits_fails_its_cases_and_the_next_one_runs(user_module, tmp_path, capsys):
    name = user_module("""
        from vtoken.reference import ReferenceExecutor

        class Exits(ReferenceExecutor):
            def append(self, *arguments):
                raise SystemExit(3)
    """)
    path = tmp_path / "result.json"
    arguments = ["--executor", f"{name}:Exits", "--executor", "reference", "--json", str(path)]
    assert run(*arguments, "--case", "fingerprint/golden*", "--case", "random/1") == 1
    rows = json.loads(path.read_text())["rows"]
    assert {row["status"] for row in rows if row["executor"] == "reference"} == {"passed"}
    assert {row["status"] for row in rows if row["executor"] == f"{name}:Exits"} == {"error"}
    assert "SystemExit: 3" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"\x7fELF\xff", "no text ('utf-8' codec can't decode byte 0xff"),
        (
            b'{"schema": "vtoken/victims/1"}\n{"trace_key": 0, "at_computed": 8, "chosen": [-1], "died": [8]}\n',
            ":2: no trace event: chosen[0] is -1, not an integer of at least 0",
        ),
    ],
)
def test_a_damaged_trace_is_one_line_and_2(content, message, tmp_path, capsys):
    path = tmp_path / "trace.jsonl"
    path.write_bytes(content)
    assert run("--executor", "reference", "--trace", str(path)) == 2
    captured = capsys.readouterr()
    assert (captured.out, captured.err.count("\n")) == ("", 1)
    assert f"{path}" in captured.err
    assert message in captured.err
