"""Cases: one behaviour each, as data. ``cases/<chapter>/<sentence>.json``; the chapters follow SPEC.md.

A file holds ``description``, ``rule`` (a number of SPEC.md), ``spec`` (the fields of ``KVSpec``), ``steps``, and where
wanted ``bits`` (finite), ``seed`` (0) and ``expect`` (the end). What a step may hold stands in ``STEP_FIELDS``.
"""

import difflib
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from vtoken.errors import SpecError
from vtoken.executor import KVSpec
from vtoken_conformance.bits import BIT_MODES
from vtoken_conformance.expectation import POOL_FIELDS, REQUEST_FIELDS
from vtoken_conformance.planning import PLANNERS
from vtoken_conformance.program import Program, Step
from vtoken_conformance.tamper import TAMPERS

__all__ = ["CASES_DIR", "STEP_FIELDS", "load_case", "load_cases", "read_case"]

CASES_DIR = Path(__file__).parent / "cases"

_CASE_FIELDS = {"description": str, "rule": str, "spec": dict, "steps": list, "bits": str, "seed": int, "expect": dict}
_CASE_REQUIRED = {"description", "rule", "spec", "steps"}
_RULE = re.compile(r"^(T|K|C|R|Q|A|H|INV|M)-[1-9]\d*$")
_ERRORS = ("SpecError", "PoolExhausted")

STEP_FIELDS: dict[str, tuple[dict[str, type], dict[str, type]]] = {
    "admit": ({"req": str}, {}),
    "append": ({"req": str, "tokens": int}, {"kv_tokens": int}),
    "doom": ({"req": str, "positions": list}, {}),
    "kill": ({"req": str, "positions": list}, {}),
    "recycle": ({"req": str}, {}),
    "launch": ({"req": str, "planner": str}, {"moves": int, "planned": bool}),
    "plan": ({"req": str, "planner": str}, {}),
    "launch_kept": ({"req": str}, {"tamper": str}),
    "advance": ({}, {}),
    "reap": ({}, {}),
    "settle": ({}, {}),
    "fork": ({"req": str, "child": str, "tokens": int}, {}),
    "preempt": ({"req": str}, {}),
    "finish": ({"req": str}, {}),
    "attend": ({"req": str, "queries": int}, {}),
    "expect": ({}, POOL_FIELDS),
}
"""Required and optional fields of each operation; any may have ``error`` besides. ``plan`` keeps a plan for
``launch_kept``; ``settle`` is ``advance`` and ``reap`` until nothing is in flight; where no plan is made, ``launch``
does nothing."""

_CHOICES = {"planner": tuple(PLANNERS), "tamper": tuple(TAMPERS)}


def load_cases(folder: Path = CASES_DIR) -> list[Program]:
    """All cases below a folder, in the order of their names."""
    return [load_case(path, folder) for path in sorted(folder.glob("*/*.json"))]


def load_case(path: Path, folder: Path = CASES_DIR) -> Program:
    """One case; its name is ``<chapter>/<sentence>``. Raises SpecError that names the file and the fault."""
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise SpecError(f"{path}: no JSON ({error})") from None
    return read_case(path.relative_to(folder).with_suffix("").as_posix(), record)


def read_case(name: str, record: Any) -> Program:
    """A checked program from a case's record."""
    _check_fields(name, record, {key: _CASE_FIELDS[key] for key in sorted(_CASE_REQUIRED)}, _CASE_FIELDS)
    if not _RULE.match(record["rule"]):
        raise SpecError(f"{name}: rule {record['rule']!r}: cite a number of SPEC.md, for example 'T-2'")
    if record.get("bits", "finite") not in BIT_MODES:
        raise SpecError(f"{name}: bits {record['bits']!r}: choose one of {', '.join(BIT_MODES)}")
    if not record["steps"]:
        raise SpecError(f"{name}: it has no steps")
    _check_expect(f"{name}: expect", record.get("expect", {}))
    return Program(
        name=name,
        spec=_read_spec(name, record["spec"]),
        steps=tuple(_read_steps(name, record["steps"])),
        bits=record.get("bits", "finite"),
        seed=record.get("seed", 0),
        rule=record["rule"],
        description=record["description"],
        expect=record.get("expect", {}),
    )


def _read_spec(name: str, record: Mapping[str, Any]) -> KVSpec:
    types = {field.name: str if field.name in ("dtype", "regime") else int for field in fields(KVSpec)}
    defaults = ("max_num_reqs", "regime")
    _check_fields(f"{name}: spec", record, {key: kind for key, kind in types.items() if key not in defaults}, types)
    try:
        return KVSpec(**record)
    except SpecError as error:
        raise SpecError(f"{name}: spec: {error}") from None


def _read_steps(name: str, records: list[Any]) -> Iterator[Step]:
    for number, record in enumerate(records, start=1):
        where = f"{name}: step {number}"
        op = record.get("op") if isinstance(record, dict) else None
        if op not in STEP_FIELDS:
            raise SpecError(f"{where}: op {op!r}: {_closest(str(op), STEP_FIELDS)}")
        required, optional = STEP_FIELDS[op]
        _check_fields(where, record, {"op": str, **required}, {**required, **optional, "op": str, "error": str})
        args = {key: value for key, value in record.items() if key not in ("op", "error")}
        for key, choices in _CHOICES.items():
            if key in args and args[key] not in choices:
                raise SpecError(f"{where}: {key} {args[key]!r}: choose one of {', '.join(choices)}")
        if record.get("error", "SpecError") not in _ERRORS:
            raise SpecError(f"{where}: error {record['error']!r}: choose one of {', '.join(_ERRORS)}")
        if op == "expect":
            _check_expect(where, args)
        yield Step(op, args, record.get("error"))


def _check_expect(where: str, record: Any) -> None:
    _check_fields(where, record, {}, POOL_FIELDS)
    for req_id, wanted in record.get("requests", {}).items():
        _check_fields(f"{where}, request {req_id!r}", wanted, {}, REQUEST_FIELDS)


def _check_fields(where: str, record: Any, required: Mapping[str, type], known: Mapping[str, type]) -> None:
    if not isinstance(record, dict):
        raise SpecError(f"{where}: {record!r} is no JSON object")
    for key, value in record.items():
        if key not in known:
            raise SpecError(f"{where}: unknown field {key!r}: {_closest(key, known)}")
        if type(value) is not known[key]:
            raise SpecError(f"{where}: {key} is {value!r}: give {known[key].__name__}")
    for key in required:
        if key not in record:
            raise SpecError(f"{where}: {key} is missing")


def _closest(word: str, known: Mapping[str, Any]) -> str:
    close = difflib.get_close_matches(word, known, n=1)
    return f"did you mean {close[0]!r}?" if close else f"choose one of {', '.join(known)}"
