"""Requests as a pass leaves them, and what lies between two passes: deaths, moves, new tokens."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from vtoken.invariants import Violation
from vtoken.request_table import RequestTable
from vtoken.types import BlockId, Move, Position, ReqId, SlotId
from vtoken_torch.vllm_plugin.verify.changes import Changes

__all__ = ["Seen", "changes_of", "count_written", "survivors_of"]


@dataclass(frozen=True, slots=True)
class Seen:
    """One request as a pass left it."""

    num_computed: int
    num_left_out: int
    block_ids: frozenset[BlockId]
    slots: dict[Position, SlotId]

    @classmethod
    def of(cls, table: RequestTable) -> Self:
        """A copy of what counts."""
        slots = {table.position_at(index): table.slot_at(index) for index in table.live_table_slots()}
        num_computed = table.num_computed_tokens
        return cls(num_computed, num_computed - table.cursor, frozenset(table.block_ids), slots)


@dataclass(frozen=True, slots=True)
class _Survivors:
    """``ShowsSlots``: where the tokens that outlive a pass lay before it."""

    block_size: int
    slots: Sequence[SlotId]

    def live_slots(self) -> Sequence[SlotId]:
        return self.slots


def count_written(output: Any, req_id: ReqId) -> int:
    """Tokens whose KV the step writes, drafts apart."""
    drafts = output.scheduled_spec_decode_tokens.get(req_id, ())
    return int(output.num_scheduled_tokens.get(req_id, 0)) - len(drafts)


def changes_of(req_id: ReqId, before: Seen | None, now: Seen, num_written: int) -> Changes:
    """What a pass did to one request. INV-1: no position comes back, none that joins is lost."""
    old: Mapping[Position, SlotId] = {} if before is None else before.slots
    first_new = 0 if before is None else before.num_computed
    new = range(first_new, now.num_computed)
    live = {position for position in old if position in now.slots}.union(new)
    if live != now.slots.keys():
        wrong = sorted(live.symmetric_difference(now.slots))
        raise Violation(1, req_id, f"positions {wrong} after the pass", "live before, or new", "neither, or lost")
    moves = [Move(p, src, now.slots[p]) for p, src in old.items() if now.slots.get(p, src) != src]
    dead = [position for position in old if position not in now.slots]
    new_slots = [now.slots[position] for position in new]
    num_cached = max(0, len(new_slots) - num_written)
    return Changes(before is None, dead, moves, first_new, new_slots, num_cached, now.num_left_out)


def survivors_of(
    before: Mapping[ReqId, Seen], changes: Mapping[ReqId, Changes], block_size: int
) -> dict[ReqId, _Survivors]:
    """Where the tokens that outlive a pass lay before it, by request: what its copies may not hit."""
    found = {}
    for req_id, made in changes.items():
        dead, slots = set(made.dead), {} if made.is_start else before[req_id].slots
        found[req_id] = _Survivors(block_size, [slot for position, slot in slots.items() if position not in dead])
    return found
