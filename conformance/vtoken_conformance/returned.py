"""Whether a call returned what the protocol says: types alone, so that no comparison trips over them."""

import reprlib
from collections.abc import Mapping, Sequence, Set
from numbers import Integral
from typing import Any

import numpy as np

from vtoken.executor import Attention, Observation, RequestObservation
from vtoken.types import BlockId
from vtoken_conformance.mismatch import Mismatch

__all__ = ["check_attention", "check_block_ids", "check_observation", "check_view"]

_known_views: set[tuple[type, type]] = set()


def check_attention(value: object) -> Attention:
    """A-1: positions are integers; output and mass are flat numbers."""
    seen: Attention = _of_type("A-1", "attend returned", value, Attention)
    _integers("A-1", "attend returned positions", seen.positions)
    for name, numbers in (("out", seen.out), ("mass", seen.mass)):
        try:
            is_flat = np.asarray(numbers, dtype=np.float64).ndim == 1
        except (TypeError, ValueError):
            is_flat = False
        if not is_flat:
            raise Mismatch("A-1", f"{name} that attend returned", "a flat array of floats", reprlib.repr(numbers))
    return seen


def check_observation(value: object) -> Observation:
    """T-1: every request is there with block ids, live words, positions, KV bytes and fingerprint."""
    seen: Observation = _of_type("T-1", "observe returned", value, Observation)
    _of_type("T-1", "observe returned free_block_ids", seen.free_block_ids, Set)
    for req_id, request in _of_type("T-1", "observe returned requests", seen.requests, Mapping).items():
        what = f"observe (read_row) of request {req_id!r} returned"
        _of_type("T-1", what, request, RequestObservation)
        for name in ("block_ids", "live_words", "positions"):
            _integers("T-1", f"{what} {name}", getattr(request, name))
        for kv in _of_type("T-1", f"{what} kv", request.kv, Sequence):
            _of_type("T-1", f"{what} in kv", kv, bytes)
        if len(request.kv) != len(request.positions):
            raise Mismatch("T-1", f"number of KV entries: {what}", len(request.positions), len(request.kv))
        _of_type("T-1", f"{what} fingerprint", request.fingerprint, str)
    return seen


def check_view(rule: str, op: str, view: object, kind: type) -> None:
    """``view`` has the members of a protocol; looked at once for each type, as views are read after every call."""
    if (type(view), kind) in _known_views:
        return
    missing = [name for name in vars(kind) if not name.startswith("_") and not hasattr(view, name)]
    if missing:
        got = type(view).__name__
        raise Mismatch(
            rule, f"{op} returned {got}, not {kind.__name__}", kind.__name__, f"it lacks {', '.join(missing)}"
        )
    _known_views.add((type(view), kind))


def check_block_ids(rule: str, op: str, value: object) -> list[BlockId]:
    """A list of block ids that some call returned."""
    return list(_integers(rule, f"{op} returned", value))


def _of_type(rule: str, what: str, value: object, kind: Any) -> Any:
    if not isinstance(value, kind):
        got = type(value).__name__
        raise Mismatch(rule, f"{what} {got}, not {kind.__name__}", kind.__name__, f"{got}: {reprlib.repr(value)}")
    return value


def _integers(rule: str, what: str, values: object) -> Sequence[Any]:
    sequence: Sequence[Any] = _of_type(rule, what, values, Sequence)
    wrong = [value for value in sequence if not isinstance(value, Integral)]
    if wrong:
        _of_type(rule, f"{what} with", wrong[0], int)
    return sequence
