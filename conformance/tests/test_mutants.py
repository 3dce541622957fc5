import pytest

from vtoken_conformance.case import load_cases
from vtoken_conformance.mutants import CAUGHT_BY, MUTANTS
from vtoken_conformance.run import ProgramJob, run_job

CASES = {case.name: case for case in load_cases()}


def test_every_mutant_has_its_case():
    assert MUTANTS.keys() == CAUGHT_BY.keys()
    assert len(MUTANTS) >= 16


@pytest.mark.parametrize("name", sorted(MUTANTS))
def test_a_mutant_is_caught_by_its_case(name):
    row, failure = run_job(ProgramJob(CASES[CAUGHT_BY[name]]), name, MUTANTS[name]())
    assert row.status == "failed"
    assert failure.traceback == ""
    assert failure.rule != "H-2" or name == "FingerprintByIndex"


@pytest.mark.parametrize("name", sorted(MUTANTS))
def test_a_mutant_says_what_is_wrong_with_it(name):
    assert MUTANTS[name].__name__ == name
    assert MUTANTS[name].__doc__
