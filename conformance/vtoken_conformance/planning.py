"""The three planners once more, read off SPEC R-4 to R-6 word by word: lists of slots instead of live words.

``num_targets`` is the number of free blocks that copies may go into. None says that nothing is to gain.
"""

from itertools import chain

from vtoken.types import Position, ReqId
from vtoken_conformance.model import Model
from vtoken_conformance.state import Block, Change, Request

__all__ = ["PLANNERS", "expected_change", "plan_evacuate", "plan_fill", "plan_release"]

_Slot = tuple[Block | int, int]


def plan_release(model: Model, req_id: ReqId) -> Change | None:
    """R-4: blocks with no live token, the tail apart."""
    request = model.known(req_id)
    pairs = list(zip(request.blocks, request.rows, strict=True))[:-1]
    dead = tuple(block for block, row in pairs if all(position is None for position in row))
    return Change(dead, 0, {}, packed=False) if dead and not request.plan_in_flight else None


def plan_fill(model: Model, req_id: ReqId, num_targets: int) -> Change | None:
    """R-5."""
    request, size = model.known(req_id), model.spec.block_size
    if request.plan_in_flight or request.is_packed():
        return None
    num_live_in = {b: sum(position is not None for position in row) for b, row in _pairs(request)}
    staying = [b for b in request.blocks if not model.is_private(b) and num_live_in[b] == size]
    private = [b for b in request.blocks if model.is_private(b)]
    num_live = sum(num_live_in[b] for b in request.blocks if b not in staying)
    num_blocks = -(-num_live // size)
    fullest = sorted(private, key=lambda b: -num_live_in[b])[:num_blocks]
    kept = [b for b in private if b in fullest]
    order = request.blocks.index
    by_fullness = sorted(private, key=lambda b: request.rows[order(b)].count(None))
    kept = [b for b in private if b in by_fullness[:num_blocks]]
    if kept and len(kept) == num_blocks and num_live % size and any(order(b) > order(kept[-1]) for b in staying):
        kept.pop()
    num_fresh = num_blocks - len(kept)
    if num_fresh > num_targets:
        return None
    targets: list[Block | int] = [*kept, *range(num_fresh)]
    slots: list[_Slot] = [(target, offset) for target in targets for offset in range(size)]
    leaving = tuple(b for b in request.blocks if b not in staying and b not in kept)
    return Change(leaving, num_fresh, _fill_holes(request, staying, slots[:num_live]), packed=True)


def _fill_holes(request: Request, staying: list[Block], slots: list[_Slot]) -> dict[Position, _Slot]:
    taken = {
        (block, offset): position
        for block, row in _pairs(request)
        for offset, position in enumerate(row)
        if position is not None and block not in staying
    }
    wanted = set(slots)
    movers = [position for slot, position in taken.items() if slot not in wanted]
    holes = [slot for slot in slots if slot not in taken]
    return dict(zip(movers, holes, strict=True))


def plan_evacuate(model: Model, req_id: ReqId, num_targets: int, source_utilization: float = 0.5) -> Change | None:
    """R-6."""
    request, size = model.known(req_id), model.spec.block_size
    if request.plan_in_flight:
        return None
    live = {b: [p for p in row if p is not None] for b, row in _pairs(request)}
    sources = [b for b in request.blocks[:-1] if model.is_private(b) and len(live[b]) <= source_utilization * size]

    def num_needed(blocks: list[Block]) -> int:
        return -(-sum(len(live[b]) for b in blocks) // size)

    if num_needed(sources) > num_targets:
        by_live = sorted(sources, key=lambda b: len(live[b]))
        while by_live and num_needed(by_live) > num_targets:
            by_live.pop()
        sources = [b for b in sources if b in by_live]
    num_fresh = num_needed(sources)
    if len(sources) <= num_fresh:
        return None
    carried = list(chain.from_iterable(live[b] for b in sources))
    return Change(tuple(sources), num_fresh, {p: divmod(i, size) for i, p in enumerate(carried)}, packed=False)


def expected_change(
    planner: str, model: Model, req_id: ReqId, num_targets: int, source_utilization: float = 0.5
) -> Change | None:
    """What the planner of that name must plan in this state."""
    if planner == "release":
        return plan_release(model, req_id)
    if planner == "fill":
        return plan_fill(model, req_id, num_targets)
    return plan_evacuate(model, req_id, num_targets, source_utilization)


PLANNERS = {"release": "R-4", "fill": "R-5", "evacuate": "R-6"}
"""Planners by name, with the rule that says what each does."""


def _pairs(request: Request) -> list[tuple[Block, list[Position | None]]]:
    return list(zip(request.blocks, request.rows, strict=True))
