from dataclasses import replace
from types import SimpleNamespace

import pytest

from vtoken.errors import SpecError
from vtoken.executor import Attention
from vtoken.reference import ListStore, ReferenceExecutor
from vtoken_conformance.bits import make_token
from vtoken_conformance.case import load_cases
from vtoken_conformance.checked import CheckedExecutor
from vtoken_conformance.mismatch import Mismatch
from vtoken_conformance.run import run_all, select_jobs


def _drive(checked, spec):
    checked.allocate(spec)
    checked.admit("a")
    checked.append("a", 5, b"".join(make_token(spec, "finite", "t", position) for position in range(5)))
    checked.reap()


def failing(executor, spec):
    """The first difference of an executor that gets a request of five tokens and reaps."""
    with pytest.raises(Mismatch) as caught:
        _drive(CheckedExecutor(executor), spec)
    return caught.value.rule, caught.value.what, caught.value.got


def returning(method, value):
    return type("Returning", (ReferenceExecutor,), {method: lambda self, *arguments: value})()


@pytest.mark.parametrize(
    ("method", "value", "rule", "what"),
    [
        ("attend", None, "A-1", "attend returned NoneType, not Attention"),
        ("attend", 5, "A-1", "attend returned int, not Attention"),
        ("attend", Attention([], None, []), "A-1", "attend returned positions NoneType, not Sequence"),
        ("attend", Attention([], ("1",), []), "A-1", "attend returned positions with str, not int"),
        ("attend", Attention(None, (), []), "A-1", "out that attend returned"),
        ("attend", Attention([[1.0]], (), []), "A-1", "out that attend returned"),
        ("attend", Attention([1.0], (), ["x"]), "A-1", "mass that attend returned"),
        ("observe", None, "T-1", "observe returned NoneType, not Observation"),
        ("observe", {}, "T-1", "observe returned dict, not Observation"),
        ("reap", None, "R-7", "reap returned NoneType, not Sequence"),
        ("reap", [[1]], "R-7", "reap returned with list, not int"),
        ("table_view", None, "T-1", "table_view of request 'a' returned NoneType, not TableView"),
        ("table_view", SimpleNamespace(cursor=0), "T-1", "table_view of request 'a' returned SimpleNamespace, not"),
        ("pool_view", None, "INV-6", "pool_view returned NoneType, not PoolView"),
    ],
)
def test_a_value_of_a_wrong_type_is_blamed_on_the_call_that_returned_it(spec, method, value, rule, what):
    seen_rule, seen_what, _ = failing(returning(method, value), spec)
    assert seen_rule == rule
    assert seen_what.startswith(what)


@pytest.mark.parametrize(
    ("field", "value", "what"),
    [
        ("positions", None, "positions NoneType, not Sequence"),
        ("block_ids", ("1",), "block_ids with str, not int"),
        ("live_words", 3, "live_words int, not Sequence"),
        ("kv", None, "kv NoneType, not Sequence"),
        ("kv", ([1, 2],), "in kv list, not bytes"),
        ("fingerprint", 7, "fingerprint int, not str"),
    ],
)
def test_a_wrong_field_of_a_row_is_named(spec, field, value, what):
    class Store(ListStore):
        def read_row(self, row):
            return replace(super().read_row(row), **{field: value})

    executor = type("Returning", (ReferenceExecutor,), {"_make_store": lambda self, spec: Store(spec)})()
    rule, seen, _ = failing(executor, spec)
    assert (rule, seen) == ("T-1", f"observe (read_row) of request 'a' returned {what}")


def test_a_row_with_fewer_bytes_than_positions_is_told(spec):
    class Store(ListStore):
        def read_row(self, row):
            seen = super().read_row(row)
            return replace(seen, kv=seen.kv[1:])

    executor = type("Returning", (ReferenceExecutor,), {"_make_store": lambda self, spec: Store(spec)})()
    rule, seen, got = failing(executor, spec)
    assert (rule, got) == ("T-1", "4")
    assert seen.startswith("number of KV entries")


def test_a_wrong_type_fails_a_case_without_a_traceback():
    class Store(ListStore):
        def read_row(self, row):
            return None

    make = type("Returning", (ReferenceExecutor,), {"_make_store": lambda self, spec: Store(spec)})
    ((row, failure),) = run_all(select_jobs(load_cases(), ["token_table/a_kill_frees_no_block"], 0), {"bad": make})
    assert (row.status, failure.rule, failure.traceback) == ("failed", "T-1", "")
    assert failure.what == "observe (read_row) of request 'a' returned NoneType, not RequestObservation"
    assert (failure.expected, failure.got) == ("RequestObservation", "NoneType: None")


def test_attention_that_is_refused_though_legal_is_blamed_on_attend(spec):
    class Refusing(ReferenceExecutor):
        def attend(self, req_id, q, num_queries=1):
            raise SpecError("not today")

    assert failing(Refusing(), spec) == ("A-1", "attend is legal here", "SpecError: not today")
