import copy
import json
import re

import pytest

from vtoken.errors import SpecError
from vtoken.reference import ReferenceExecutor
from vtoken_conformance.case import CASES_DIR, STEP_FIELDS, load_case, load_cases, read_case
from vtoken_conformance.checked import CheckedExecutor
from vtoken_conformance.program import ProgramRun
from vtoken_conformance.run import ProgramJob, run_job

CASES = load_cases()
CHAPTERS = {
    "attention": "ATC",
    "fingerprint": "HQ",
    "invariants": "I",
    "kill_schedule": "K",
    "plans": "RI",
    "recycle": "C",
    "requests": "QTI",
    "token_table": "T",
}
"""Chapters, with the letters of the rules that their cases cite."""

GOOD = {
    "description": "text",
    "rule": "T-2",
    "spec": {
        "num_layers": 1,
        "num_kv_heads": 1,
        "num_query_heads": 1,
        "head_size": 2,
        "dtype": "float32",
        "block_size": 4,
        "num_blocks": 5,
    },
    "steps": [{"op": "admit", "req": "a"}, {"op": "append", "req": "a", "tokens": 2}],
    "expect": {"held": 1, "requests": {"a": {"live": [0, 1]}}},
}


def changed(**parts):
    record = copy.deepcopy(GOOD)
    record.update(parts)
    return record


def test_there_are_enough_cases_in_every_chapter():
    assert len(CASES) >= 60
    assert {case.name.split("/")[0] for case in CASES} == CHAPTERS.keys()


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_case_is_named_by_a_sentence_and_cites_a_rule_of_its_chapter(case):
    chapter, sentence = case.name.split("/")
    assert re.fullmatch(r"[a-z0-9]+(_[a-z0-9]+){2,}", sentence)
    assert case.rule[0] in CHAPTERS[chapter]
    assert case.description.endswith(".")


def test_every_cited_rule_stands_in_the_spec():
    spec_text = (CASES_DIR.parents[2] / "shared" / "SPEC.md").read_text(encoding="utf-8")
    assert {case.rule for case in CASES} <= set(re.findall(r"\*\*([A-Z]+-\d+)\*\*", spec_text))


def test_every_operation_is_used_by_some_case():
    assert {step.op for case in CASES for step in case.steps} == STEP_FIELDS.keys()


def test_the_cases_cover_block_sizes_dtypes_regimes_and_head_groups():
    specs = [case.spec for case in CASES]
    assert {spec.block_size for spec in specs} >= {1, 3, 4, 16, 32, 64, 128}
    assert {spec.dtype for spec in specs} == {"float32", "bfloat16", "float16"}
    assert {spec.regime for spec in specs} == {"ordered", "fenced"}
    assert {spec.num_query_heads // spec.num_kv_heads for spec in specs} >= {1, 2, 4, 8}
    assert {case.bits for case in CASES} == {"finite", "special", "random"}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_reference_executor_passes(case):
    _, failure = run_job(ProgramJob(case), "reference", ReferenceExecutor())
    assert failure is None


@pytest.mark.parametrize("case", [case for case in CASES if case.name.startswith("attention/")], ids=lambda c: c.name)
def test_a_case_of_attention_compares_attention(case):
    executor = CheckedExecutor(ReferenceExecutor(), attend=False)
    ProgramRun(case, executor).run()
    asked = [step for step in case.steps if step.op == "attend" and step.error is None]
    assert executor.num_attention_checks == len(asked)


@pytest.mark.parametrize("chapter", sorted(CHAPTERS))
def test_every_executor_passes_every_chapter(chapter, any_executor):
    jobs = [ProgramJob(case) for case in CASES if case.name.startswith(f"{chapter}/")]
    failures = [run_job(job, any_executor.name, any_executor)[1] for job in jobs]
    assert [failure for failure in failures if failure] == []


def test_a_record_becomes_a_program():
    program = read_case("chapter/sentence", GOOD)
    assert (program.name, program.bits, program.seed, program.spec.block_size) == ("chapter/sentence", "finite", 0, 4)
    assert [str(step) for step in program.steps] == ["admit req=a", "append req=a tokens=2"]
    ProgramRun(program, CheckedExecutor(ReferenceExecutor())).run()


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ([], "is no JSON object"),
        ({key: value for key, value in GOOD.items() if key != "rule"}, "rule is missing"),
        (changed(rulle="T-2"), "unknown field 'rulle': did you mean 'rule'?"),
        (changed(rule="2"), "cite a number of SPEC.md"),
        (changed(bits="odd"), "choose one of finite, special, random"),
        (changed(seed=1.5), "seed is 1.5: give int"),
        (changed(seed=True), "seed is True: give int"),
        (changed(steps=[]), "it has no steps"),
        (changed(steps=[{"op": "apend", "req": "a"}]), "step 1: op 'apend': did you mean 'append'?"),
        (changed(steps=["admit"]), "step 1: op None"),
        (changed(steps=[{"op": "append", "req": "a"}]), "step 1: tokens is missing"),
        (changed(steps=[{"op": "admit", "req": "a", "x": 1}]), "step 1: unknown field 'x'"),
        (changed(steps=[{"op": "admit", "req": "a", "error": "KeyError"}]), "choose one of SpecError, PoolExhausted"),
        (changed(steps=[{"op": "launch", "req": "a", "planner": "pack"}]), "choose one of release, fill, evacuate"),
        (changed(steps=[{"op": "launch_kept", "req": "a", "tamper": "x"}]), "tamper 'x': choose one of drop_move"),
        (changed(spec={**GOOD["spec"], "block_size": 999}), "spec: block_size=999"),
        (changed(spec={**GOOD["spec"], "block_size": "4"}), "block_size is '4': give int"),
        (changed(expect={"hold": 1}), "expect: unknown field 'hold': did you mean 'held'?"),
        (
            changed(expect={"requests": {"a": {"lives": []}}}),
            "request 'a': unknown field 'lives': did you mean 'live'?",
        ),
        (changed(steps=[{"op": "expect", "held": "1"}]), "step 1: held is '1': give int"),
    ],
)
def test_a_faulty_record_is_refused_by_name(record, message):
    with pytest.raises(SpecError) as caught:
        read_case("chapter/sentence", record)
    assert str(caught.value).startswith("chapter/sentence")
    assert message in str(caught.value)


def test_a_file_that_is_no_json_is_refused_by_its_path(tmp_path):
    (tmp_path / "plans").mkdir()
    path = tmp_path / "plans" / "torn.json"
    path.write_text('{"description": ')
    with pytest.raises(SpecError, match=r"torn\.json: no JSON"):
        load_case(path, tmp_path)


@pytest.mark.parametrize(
    "wrong",
    [
        {"held": 2},
        {"free": 0},
        {"in_flight": 1},
        {"admitted": ["a", "b"]},
        {"requests": {"b": {"live": []}}},
        {"requests": {"a": {"live": [0]}}},
        {"requests": {"a": {"layout": [[0, None, 1]]}}},
        {"requests": {"a": {"blocks": 2}}},
        {"requests": {"a": {"cursor": 1}}},
        {"requests": {"a": {"computed": 3}}},
        {"requests": {"a": {"doomed": [0]}}},
        {"requests": {"a": {"shared_blocks": 1}}},
        {"requests": {"a": {"fingerprint": "0" * 16}}},
    ],
    ids=json.dumps,
)
def test_a_wrong_expectation_fails_under_the_rule_of_its_case(wrong):
    _, failure = run_job(ProgramJob(read_case("a/b", changed(expect=wrong))), "reference", ReferenceExecutor())
    assert failure.rule == "T-2"


def test_a_step_that_should_have_raised_fails():
    steps = [*GOOD["steps"], {"op": "kill", "req": "a", "positions": [0], "error": "SpecError"}]
    _, failure = run_job(
        ProgramJob(read_case("a/b", changed(steps=steps, expect={}))), "reference", ReferenceExecutor()
    )
    assert (failure.step, failure.expected, failure.got) == (3, "SpecError", "None")


def test_a_step_that_should_not_have_raised_fails():
    steps = [*GOOD["steps"], {"op": "kill", "req": "a", "positions": [7]}]
    _, failure = run_job(
        ProgramJob(read_case("a/b", changed(steps=steps, expect={}))), "reference", ReferenceExecutor()
    )
    assert (failure.step, failure.expected) == (3, "none")
    assert failure.got.startswith("SpecError: position 7")
