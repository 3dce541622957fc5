"""What a case says that it will see, compared with what the executor shows: counts, places, holders, fingerprints."""

from collections import Counter
from collections.abc import Mapping
from typing import Any

from vtoken.executor import Observation, RequestObservation
from vtoken.types import ReqId
from vtoken_conformance.checked import CheckedExecutor
from vtoken_conformance.mismatch import compare_equal

__all__ = ["POOL_FIELDS", "REQUEST_FIELDS", "compare_expectation"]

POOL_FIELDS = {"admitted": list, "held": int, "free": int, "in_flight": int, "requests": dict}
"""Fields of an expectation, with their JSON types."""

REQUEST_FIELDS = {
    "blocks": int,
    "computed": int,
    "cursor": int,
    "doomed": list,
    "fingerprint": str,
    "layout": list,
    "live": list,
    "shared_blocks": int,
}
"""Fields under ``requests/<req_id>``. ``layout`` holds one list a block: position or null for each slot up to the last
live one."""


def compare_expectation(expected: Mapping[str, Any], executor: CheckedExecutor, rule: str) -> None:
    """Raises Mismatch with the case's own rule at the first field that differs."""
    if not expected:
        return
    seen = executor.observe()
    in_flight = executor.pool_view().num_in_flight
    pool = {
        "admitted": sorted(seen.requests),
        "held": len(seen.held_block_ids),
        "free": len(seen.free_block_ids),
        "in_flight": in_flight,
    }
    for key, value in expected.items():
        if key != "requests":
            compare_equal(rule, f"{key} at this point", value, pool[key])
    for req_id, wanted in expected.get("requests", {}).items():
        compare_equal(rule, f"request {req_id!r} is admitted at this point", True, req_id in seen.requests)
        shown = _shown(seen, req_id, executor)
        for key, value in wanted.items():
            compare_equal(rule, f"{key} of request {req_id!r} at this point", value, shown[key])


def _shown(seen: Observation, req_id: ReqId, executor: CheckedExecutor) -> dict[str, Any]:
    request, view = seen.requests[req_id], executor.table_view(req_id)
    holders = Counter(block for other in seen.requests.values() for block in other.block_ids)
    return {
        "blocks": len(request.block_ids),
        "computed": view.num_computed_tokens,
        "cursor": view.cursor,
        "doomed": view.next_doomed(view.num_doomed_tokens + 1),
        "fingerprint": executor.fingerprint(req_id),
        "layout": _layout(request),
        "live": sorted(request.positions),
        "shared_blocks": sum(holders[block] > 1 for block in request.block_ids),
    }


def _layout(request: RequestObservation) -> list[list[int | None]]:
    positions = iter(request.positions)
    return [
        [next(positions) if word >> offset & 1 else None for offset in range(word.bit_length())]
        for word in request.live_words
    ]
