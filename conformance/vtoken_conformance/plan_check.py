"""Reads a plan in the model's words, and compares it with the rules of its planner (R-4 to R-6, INV-4, INV-5)."""

from vtoken.executor import KVSpec
from vtoken.reclamation.plan import ReclamationPlan, TableView
from vtoken.types import Position, ReqId
from vtoken_conformance.mismatch import Mismatch
from vtoken_conformance.model import Model
from vtoken_conformance.planning import PLANNERS, expected_change
from vtoken_conformance.state import Block, Change, Refusal, Request

__all__ = ["check_planned", "check_profit", "read_plan"]


def read_plan(model: Model, plan: ReclamationPlan, view: TableView) -> Change:
    """The plan as a change of the model's blocks. Raises Refusal where an executor must refuse it."""
    request = model.known(plan.req_id)
    if request.plan_in_flight:
        raise Refusal("INV-4", "a plan of this request is in flight")
    made_at = (plan.layout_version, plan.liveness_version, plan.num_live_tokens)
    now = (view.layout_version, view.liveness_version, view.num_live_tokens)
    if made_at[0] != now[0] or (plan.packed and made_at != now):
        raise Refusal("INV-4", f"it was made at version {made_at}, the table is at {now}")
    leaving, fresh_rank = _read_blocks(model, request, plan)
    moves = _read_moves(model, request, plan, leaving, fresh_rank)
    stranded = {
        p for b, row in zip(request.blocks, request.rows, strict=True) if b in leaving for p in row if p is not None
    }
    if stranded - moves.keys():
        raise Refusal("INV-1", f"positions {sorted(stranded - moves.keys())} would be lost with their block")
    return Change(leaving, len(fresh_rank), moves, plan.packed)


def _read_blocks(model: Model, request: Request, plan: ReclamationPlan) -> tuple[tuple[Block, ...], dict[int, int]]:
    by_id = {block.block_id: block for block in request.blocks}
    freed, new = plan.freed_block_ids, plan.new_block_ids
    if len({*freed, *new}) != len(freed) + len(new) or not {*freed} <= by_id.keys() or not {*new} <= model.free_ids():
        raise Refusal("R-1", f"it frees {freed} and adds {new}: twice, not held, or not free")
    if not plan.packed and request.blocks and request.blocks[-1].block_id in freed:
        raise Refusal("R-4", "it frees the tail block")
    if not {*new} <= model.target_ids():
        raise Refusal("INV-5", f"one of {new} was freed in this pass")
    return tuple(by_id[block_id] for block_id in freed), {block_id: rank for rank, block_id in enumerate(new)}


def _read_moves(
    model: Model, request: Request, plan: ReclamationPlan, leaving: tuple[Block, ...], fresh_rank: dict[int, int]
) -> dict[Position, tuple[Block | int, int]]:
    size = model.spec.block_size
    rows = {block.block_id: row for block, row in zip(request.blocks, request.rows, strict=True)}
    holes: dict[int, tuple[Block | int, int]] = {
        block_id * size + offset: (rank, offset) for block_id, rank in fresh_rank.items() for offset in range(size)
    }
    for block, row in zip(request.blocks, request.rows, strict=True):
        if block not in leaving and block.block_id is not None:
            holes |= {block.block_id * size + o: (block, o) for o, position in enumerate(row) if position is None}
    moves: dict[Position, tuple[Block | int, int]] = {}
    for position, src_slot, dst_slot in plan.moves:
        src_id, src_offset = divmod(src_slot, size)
        if src_id not in rows or rows[src_id][src_offset] != position or position in moves:
            raise Refusal("INV-5", f"position {position} is not live in slot {src_slot}, or moves twice")
        if dst_slot not in holes:
            raise Refusal("INV-5", f"slot {dst_slot} is no hole of the request, or a target twice")
        target, _ = moves[position] = holes.pop(dst_slot)
        if isinstance(target, Block) and not model.is_private(target):
            raise Refusal("INV-7", f"slot {dst_slot} lies in a shared block")
    return moves


def check_planned(
    model: Model, req_id: ReqId, planners: tuple[str, ...], change: Change | None, source_utilization: float = 0.5
) -> None:
    """R-4, R-5 or R-6: the change (None: no plan) is what one of the planners must plan in this state."""
    num_targets = len(model.target_ids())
    expected = [expected_change(name, model, req_id, num_targets, source_utilization) for name in planners]
    if change not in expected:
        what = f"plan of {' or '.join(planners)} for request {req_id!r}"
        raise Mismatch(PLANNERS[planners[-1]], what, _describe(expected[-1], model.spec), _describe(change, model.spec))


def check_profit(model: Model, req_id: ReqId, change: Change) -> None:
    """INV-4, after the commit: a packed layout, or at least one block back."""
    if change.packed and not model.requests[req_id].is_packed():
        raise Mismatch("INV-4", f"layout of request {req_id!r} after its plan", "packed", model.requests[req_id].rows)
    if not change.packed and len(change.leaving) <= change.num_fresh:
        got = f"{len(change.leaving)} leave, {change.num_fresh} join"
        raise Mismatch("INV-4", f"blocks of request {req_id!r} freed net by its plan", "at least 1", got)


def _describe(change: Change | None, spec: KVSpec) -> str:
    if change is None:
        return "no plan"
    leaving = [block.block_id for block in change.leaving]
    moves = {
        position: f"fresh {target}+{offset}"
        if isinstance(target, int)
        else str((target.block_id or 0) * spec.block_size + offset)
        for position, (target, offset) in change.moves.items()
    }
    kind = "packed" if change.packed else "not packed"
    return f"blocks {leaving} leave, {change.num_fresh} join, {kind}, moves (position: slot) {moves}"
