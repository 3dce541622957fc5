"""Compares what an executor shows with the model; the first difference raises ``Mismatch``, which cites the rule."""

import numpy as np

from vtoken.executor import Attention, Executor, Observation, RequestObservation
from vtoken.reclamation.plan import PoolView, TableView
from vtoken.types import BlockId, Position, ReqId
from vtoken_conformance.attention import TOLERANCE, Array, attention
from vtoken_conformance.fingerprint import fingerprint
from vtoken_conformance.mismatch import Call, Mismatch
from vtoken_conformance.model import Model
from vtoken_conformance.returned import check_view
from vtoken_conformance.state import Request

__all__ = ["VersionWatch", "compare_arrays", "compare_attention", "compare_views"]


class VersionWatch:
    """T-6: a version moves if, and only if, the model saw a change of its kind since the last call."""

    def __init__(self) -> None:
        self._last: dict[ReqId, tuple[tuple[int, int], tuple[int, int]]] = {}

    def compare(self, model: Model, executor: Executor, call: Call) -> None:
        """Looks at both versions of all requests, and remembers them."""
        last, self._last = self._last, {}
        for req_id, request in model.requests.items():
            view = executor.table_view(req_id)
            counts = (request.num_layout_changes, request.num_liveness_changes)
            versions = (view.layout_version, view.liveness_version)
            self._last[req_id] = (counts, versions)
            old_counts, old_versions = last.get(req_id, (counts, versions))
            for index, name in enumerate(("layout_version", "liveness_version")):
                expected, got = counts[index] != old_counts[index], versions[index] != old_versions[index]
                may_differ = call.op == "launch" and got  # a plan that moves the cursor alone may count as a change
                if expected != got and not may_differ:
                    words = ("stays", "changes")
                    raise Mismatch("T-6", f"{name} of request {req_id!r}", words[expected], words[got])


def compare_views(model: Model, executor: Executor, call: Call) -> None:
    """Counts, cursors and block lists of the host's views; blocks seen for the first time get their numbers."""
    for req_id, request in model.requests.items():
        view = executor.table_view(req_id)
        check_view("T-1", f"table_view of request {req_id!r}", view, TableView)
        _bind_blocks(model, req_id, tuple(view.block_ids), call)
        counts: dict[str, tuple[int, int]] = {
            "computed tokens": (request.num_computed, view.num_computed_tokens),
            "live tokens": (len(request.kv), view.num_live_tokens),
            "doomed tokens": (len(request.doomed), view.num_doomed_tokens),
            "cursor": (request.cursor, view.cursor),
            "plan in flight": (request.plan_in_flight, view.plan_in_flight),
        }
        for what, (expected, got) in counts.items():
            if expected != got:
                raise Mismatch(call.rule("count", req_id), f"{what} of request {req_id!r}", expected, got)
    pool = executor.pool_view()
    check_view("INV-6", "pool_view", pool, PoolView)
    counted = (model.num_free, len(model.held()), len(model.in_flight()))
    shown = (pool.num_free, pool.num_blocks - 1 - pool.num_free - pool.num_in_flight, pool.num_in_flight)
    if counted != shown:
        raise Mismatch("R-7" if counted[1] == shown[1] else "INV-6", "blocks (free, held, in flight)", counted, shown)


def _bind_blocks(model: Model, req_id: ReqId, block_ids: tuple[BlockId, ...], call: Call) -> None:
    blocks = model.requests[req_id].blocks
    rule = call.rule("blocks", req_id)
    if len(block_ids) != len(blocks):
        raise Mismatch(rule, f"blocks held by request {req_id!r}", len(blocks), f"{len(block_ids)}: {block_ids}")
    unnamed = [block.block_id is None for block in blocks]
    for block, block_id, is_new in zip(blocks, block_ids, unnamed, strict=True):
        if is_new:
            if block_id not in model.free_ids():
                raise Mismatch("INV-6", f"new block of request {req_id!r}", "a free block", f"{block_id}, not free")
            block.block_id = block_id
    known = tuple(block.block_id for block in blocks)
    if block_ids != known:
        raise Mismatch(rule, f"block list of request {req_id!r}", known, block_ids)


def compare_arrays(model: Model, observation: Observation, call: Call) -> None:
    """Everything that the executor reads back from its own arrays."""
    if observation.requests.keys() != model.requests.keys():
        raise Mismatch(call.main_rule, "requests", sorted(model.requests), sorted(observation.requests))
    for req_id, request in model.requests.items():
        _compare_request(req_id, request, observation.requests[req_id], call)
    _compare_free(model, observation)


def _compare_request(req_id: ReqId, request: Request, seen: RequestObservation, call: Call) -> None:
    known = tuple(block.block_id for block in request.blocks)
    if seen.block_ids != known:
        raise Mismatch(call.rule("blocks", req_id), f"block table row of request {req_id!r}", known, seen.block_ids)
    order = request.physical_order()
    if sorted(seen.positions) != sorted(order):
        raise Mismatch(
            call.rule("live", req_id),
            f"live positions of request {req_id!r}",
            *_brief(sorted(order), sorted(seen.positions)),
        )
    words = tuple(sum(1 << o for o, p in enumerate(row) if p is not None) for row in request.rows)
    if seen.live_words != words or list(seen.positions) != order:
        expected, got = (list(map(bin, words)), order), (list(map(bin, seen.live_words)), list(seen.positions))
        raise Mismatch(
            call.rule("place", req_id), f"live words and positions in order of request {req_id!r}", expected, got
        )
    for position, data in zip(seen.positions, seen.kv, strict=True):
        if data != request.kv[position]:
            where = f"KV bytes of position {position} of request {req_id!r}"
            raise Mismatch(call.rule("bytes", req_id), where, *_first_bytes(request.kv[position], data))
    if seen.fingerprint != fingerprint(request.kv):
        raise Mismatch("H-2", f"fingerprint of request {req_id!r}", fingerprint(request.kv), seen.fingerprint)


def _compare_free(model: Model, observation: Observation) -> None:
    free = set(observation.free_block_ids)
    early = free & {block.block_id for block in model.in_flight()}
    if early:
        raise Mismatch("R-7", "blocks in flight that are free already", "none", sorted(early))
    both = free & {block.block_id for block in model.held()}
    if both:
        raise Mismatch("INV-6", "blocks both free and held", "none", sorted(both))
    if free != model.free_ids():
        raise Mismatch("INV-6", "free blocks", *_brief(sorted(model.free_ids()), sorted(free)))


def compare_attention(
    model: Model, req_id: ReqId, seen: Attention, q: bytes, query_positions: range, what: str = ""
) -> None:
    """A-1 to A-4, where all live tokens are moderate."""
    spec, request = model.spec, model.requests[req_id]
    where = f"of request {req_id!r}, queries at {list(query_positions)}"
    if sorted(seen.positions) != sorted(request.kv):
        raise Mismatch(
            "A-1", f"live positions in attention {where}", *_brief(sorted(request.kv), sorted(seen.positions))
        )
    expected_out, expected_mass = attention(spec, request.kv, q, query_positions)
    tolerance = TOLERANCE[spec.dtype]
    out = np.asarray(seen.out, dtype=np.float64)
    if out.size != expected_out.size or len(seen.mass) != len(seen.positions):
        raise Mismatch(
            "A-1", f"sizes of output and mass {where}", (expected_out.size, len(request.kv)), (out.size, len(seen.mass))
        )
    if not np.isfinite(out).all():
        raise Mismatch("A-2", f"attention output {where}", "finite numbers", "NaN or infinity")
    _compare_numbers("A-1", f"attention output {where}", expected_out.ravel(), out, tolerance)
    expected = np.array([expected_mass[position] for position in seen.positions])
    _compare_numbers("A-3", f"attention mass {where}", expected, np.asarray(seen.mass, dtype=np.float64), tolerance)


def _compare_numbers(rule: str, what: str, expected: Array, got: Array, tolerance: float) -> None:
    if not expected.size:
        return
    allowed = tolerance * float(np.abs(expected).max())
    difference = np.abs(expected - got)
    worst = int(np.argmax(np.where(np.isnan(difference), np.inf, difference)))
    if not difference[worst] <= allowed:
        raise Mismatch(
            rule,
            f"{what}, element {worst} (allowed difference {allowed:.3g})",
            f"{expected[worst]:.7g}",
            f"{got[worst]:.7g}",
        )


def _brief(expected: list[Position], got: list[Position]) -> tuple[str, str]:
    """Two lists as text; of long ones the differences alone."""
    if len(expected) + len(got) <= 40:
        return str(expected), str(got)
    missing, extra = sorted({*expected} - {*got}), sorted({*got} - {*expected})
    return f"{len(expected)} numbers", f"{len(got)}: without {missing[:8]}, with {extra[:8]} besides"


def _first_bytes(expected: bytes, got: bytes) -> tuple[str, str]:
    """The surroundings of the first byte that differs."""
    if len(expected) != len(got):
        return f"{len(expected)} bytes", f"{len(got)} bytes"
    at = next(i for i, (a, b) in enumerate(zip(expected, got, strict=True)) if a != b)
    num_wrong = sum(a != b for a, b in zip(expected, got, strict=True))
    low = at // 4 * 4
    return f"{expected[low : low + 8].hex()} at byte {low}", f"{got[low : low + 8].hex()} ({num_wrong} bytes differ)"
