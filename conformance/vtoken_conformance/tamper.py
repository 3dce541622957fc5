"""Plans with one fault each: an executor must refuse them and change nothing (R-1, INV-1, INV-5)."""

from collections.abc import Callable
from dataclasses import replace

from vtoken.executor import Executor
from vtoken.reclamation.plan import ReclamationPlan
from vtoken.types import NULL_BLOCK_ID

__all__ = ["TAMPERS", "tampered"]


def _drop_move(plan: ReclamationPlan, executor: Executor) -> ReclamationPlan:
    """A token stays behind in a block that leaves."""
    size = executor.spec.block_size
    behind = next(move for move in plan.moves if move.src_slot // size in plan.freed_block_ids)
    return replace(plan, moves=tuple(move for move in plan.moves if move is not behind))


def _repeat_target(plan: ReclamationPlan, executor: Executor) -> ReclamationPlan:
    """Two tokens go to one slot."""
    first, second = plan.moves[:2]
    return replace(plan, moves=(first, second._replace(dst_slot=first.dst_slot), *plan.moves[2:]))


def _live_target(plan: ReclamationPlan, executor: Executor) -> ReclamationPlan:
    """A token goes to the slot of the next one that moves."""
    first, second = plan.moves[:2]
    return replace(plan, moves=(first._replace(dst_slot=second.src_slot), *plan.moves[1:]))


def _wrong_position(plan: ReclamationPlan, executor: Executor) -> ReclamationPlan:
    """The source slot holds another token than the one named."""
    first, second = plan.moves[:2]
    return replace(plan, moves=(first._replace(position=second.position), *plan.moves[1:]))


def _free_twice(plan: ReclamationPlan, executor: Executor) -> ReclamationPlan:
    """One block leaves twice."""
    return replace(plan, freed_block_ids=(*plan.freed_block_ids, plan.freed_block_ids[0]))


def _free_foreign(plan: ReclamationPlan, executor: Executor) -> ReclamationPlan:
    """A block leaves that the request does not hold."""
    foreign = max(executor.observe().free_block_ids)
    return replace(plan, freed_block_ids=(*plan.freed_block_ids, foreign))


def _free_tail(plan: ReclamationPlan, executor: Executor) -> ReclamationPlan:
    """The block with the cursor leaves, though the plan does not pack."""
    return replace(plan, freed_block_ids=(*plan.freed_block_ids, executor.table_view(plan.req_id).block_ids[-1]))


def _add_held(plan: ReclamationPlan, executor: Executor) -> ReclamationPlan:
    """A block joins that the request holds already."""
    return replace(plan, new_block_ids=(*plan.new_block_ids, executor.table_view(plan.req_id).block_ids[-1]))


def _add_null(plan: ReclamationPlan, executor: Executor) -> ReclamationPlan:
    """The null block joins."""
    return replace(plan, new_block_ids=(*plan.new_block_ids, NULL_BLOCK_ID))


TAMPERS: dict[str, Callable[[ReclamationPlan, Executor], ReclamationPlan]] = {
    "drop_move": _drop_move,
    "repeat_target": _repeat_target,
    "live_target": _live_target,
    "wrong_position": _wrong_position,
    "free_twice": _free_twice,
    "free_foreign": _free_foreign,
    "free_tail": _free_tail,
    "add_held": _add_held,
    "add_null": _add_null,
}


def tampered(fault: str, plan: ReclamationPlan, executor: Executor) -> ReclamationPlan:
    """The plan with one fault by name."""
    return TAMPERS[fault](plan, executor)
