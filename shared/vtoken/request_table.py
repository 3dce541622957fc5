"""States of one request's tokens, live -> doomed -> dead, on top of their places (SPEC T-1)."""

from array import array
from collections import deque
from collections.abc import Iterable, Sequence
from itertools import compress
from itertools import count as count_from

from vtoken.errors import SpecError
from vtoken.table_layout import TableLayout
from vtoken.types import BlockId, Position, ReqId, SlotId, cdiv

__all__ = ["RequestTable"]

_LIVE, _DOOMED, _DEAD = 0, 1, 2
_IS_LIVE = bytes(state == _LIVE for state in range(256))  # for bytearray.translate


class RequestTable(TableLayout):
    """One request's token table: at most 16 bytes a token, no per-layer state.

    A doomed token is a queued victim. It counts as live everywhere, but policies never see it as a candidate.
    """

    def __init__(self, req_id: ReqId, block_size: int) -> None:
        super().__init__(req_id, block_size)
        self.num_doomed_tokens = 0
        self._state = bytearray()
        self._doomed: deque[Position] = deque()
        self._recycled: Position | None = None

    # -- reading -----------------------------------------------------------------------------------------------------

    @property
    def num_computed_tokens(self) -> int:
        """KV written so far, evicted tokens included."""
        return len(self._state)

    @property
    def num_evicted_tokens(self) -> int:
        """Dead tokens, counted by state (INV-8: live = computed - evicted)."""
        return self._state.count(_DEAD)

    def is_live(self, position: Position) -> bool:
        """Whether a computed token is live (doomed tokens are)."""
        self.table_slot_of(position)
        return self._state[position] != _DEAD

    def is_doomed(self, position: Position) -> bool:
        """Whether a computed token is queued to die."""
        self.table_slot_of(position)
        return self._state[position] == _DOOMED

    def candidates(self) -> list[Position]:
        """Live positions that are not doomed, ascending: what a policy may choose from."""
        return list(compress(range(len(self._state)), self._state.translate(_IS_LIVE)))

    def next_doomed(self, count: int) -> list[Position]:
        """The first ``count`` queued victims, in the order of their deaths."""
        queue = self._doomed
        while queue and self._state[queue[0]] != _DOOMED:
            queue.popleft()
        if count == 1:
            return [queue[0]] if queue else []
        return [position for position in queue if self._state[position] == _DOOMED][:count]

    # -- writing -----------------------------------------------------------------------------------------------------

    def sync_new_tokens(self, block_ids: Sequence[BlockId], total_len: int) -> None:
        """Registers positions up to ``total_len``; ``block_ids`` is the whole current list. Idempotent.

        New tokens take the slots from the cursor on. The list is compared at the last known block alone, so that a
        decode step costs the same at any length.
        """
        num_new = total_len - len(self._state)
        if num_new < 0:
            raise SpecError(
                f"sync_new_tokens: request {self.req_id!r} has {len(self._state)} computed tokens, "
                f"total_len={total_len} is less: preempt it to start again"
            )
        self._check_block_list(block_ids)
        end = self.cursor + num_new
        if end > len(block_ids) * self.block_size:
            raise SpecError(
                f"sync_new_tokens: request {self.req_id!r} needs {cdiv(end, self.block_size)} blocks for "
                f"total_len={total_len}, block_ids has {len(block_ids)}"
            )
        if len(block_ids) > len(self.block_ids):
            self._add_blocks(block_ids[len(self.block_ids) :])
        if num_new:
            self._recycled = None
            self._write_new(num_new)

    def evict_token(self, position: Position) -> bool:
        """Kills one token, a doomed one at once. Moves nothing, frees nothing. False if it was dead already."""
        return bool(self.evict_tokens((position,)))

    def evict_tokens(self, positions: Iterable[Position]) -> list[Position]:
        """Kills tokens; returns those that were alive. All positions are checked before the first is killed."""
        positions = self._checked(positions)
        state, place, words, size = self._state, self._place, self.live_words, self.block_size
        killed = []
        for position in positions:
            was = state[position]
            if was == _DEAD:
                continue
            if was == _DOOMED:
                self.num_doomed_tokens -= 1
            state[position] = _DEAD
            index, offset = divmod(place[position], size)
            words[index] ^= 1 << offset
            killed.append(position)
        if killed:
            self._recycled = None
            self.num_live_tokens -= len(killed)
            self.liveness_version += 1
        return killed

    def doom(self, positions: Iterable[Position]) -> None:
        """Queues victims in the given order; they stay live everywhere until killed or recycled."""
        positions = self._checked(positions)
        if len(set(positions)) != len(positions):
            raise SpecError(f"doom: a position is named twice for request {self.req_id!r}: {positions}")
        for position in positions if any(map(self._state.__getitem__, positions)) else ():
            if self._state[position] != _LIVE:
                state = "doomed" if self._state[position] == _DOOMED else "dead"
                raise SpecError(f"doom: position {position} of request {self.req_id!r} is {state}: choose live tokens")
        for position in positions:
            self._state[position] = _DOOMED
        self._recycled = None
        self._doomed.extend(positions)
        self.num_doomed_tokens += len(positions)
        self.liveness_version += bool(positions)

    def recycle(self, victim: Position, new_position: Position) -> SlotId:
        """Kills a doomed victim and registers the next token in its slot, in one atomic call; returns the slot.

        The caller answers for the block being private. Nothing is recycled while a plan is in flight.
        """
        if not self.is_doomed(victim):
            raise SpecError(f"recycle: position {victim} of request {self.req_id!r} is not doomed: doom it first")
        if new_position != len(self._state):
            raise SpecError(
                f"recycle: request {self.req_id!r} writes position {len(self._state)} next, not {new_position}: "
                "recycle serves single-token steps only"
            )
        if self.plan_in_flight:
            raise SpecError(
                f"recycle: request {self.req_id!r} has a plan in flight: kill the victim and append instead"
            )
        table_slot = self._place[victim]
        self._state[victim] = _DEAD
        self._state.append(_LIVE)
        self._place.append(table_slot)
        self._position[table_slot] = new_position
        self.num_doomed_tokens -= 1
        self._recycled = victim
        return self.slot_at(table_slot)

    def recycle_next(self, count: int) -> None:
        """``recycle`` of the next ``count`` doomed tokens, one after another. Only the last can be rolled back."""
        victims = self.next_doomed(count)
        if len(victims) != count or self.plan_in_flight:
            raise SpecError(
                f"recycle_next: request {self.req_id!r} has {len(victims)} doomed tokens to recycle, {count} are asked "
                f"for, plan in flight: {self.plan_in_flight}"
            )
        state, position_of = self._state, self._position
        table_slots = [self._place[victim] for victim in victims]
        for new_position, victim, table_slot in zip(count_from(len(state)), victims, table_slots, strict=False):
            state[victim] = _DEAD
            position_of[table_slot] = new_position
        self._place.extend(table_slots)
        state.extend(bytes(count))
        self.num_doomed_tokens -= count
        self._recycled = victims[-1] if victims else self._recycled

    def rollback_recycle(self) -> Position:
        """Takes back the last recycle: its victim, returned, is doomed again and first in the queue.

        A recycle stays tentative until the next append, kill, doom or recycle of the request.
        """
        if self._recycled is None:
            raise SpecError(f"rollback_recycle: request {self.req_id!r} has no recycle to take back")
        victim, self._recycled = self._recycled, None
        table_slot = self._place.pop()  # not the victim's old one if a plan has moved the new token since
        self._place[victim], self._position[table_slot] = table_slot, victim
        self._state.pop()
        self._state[victim] = _DOOMED
        if victim in self._doomed:
            self._doomed.remove(victim)
        self._doomed.appendleft(victim)
        self.num_doomed_tokens += 1
        return victim

    # -- parts -------------------------------------------------------------------------------------------------------

    def _checked(self, positions: Iterable[Position]) -> Sequence[Position]:
        positions = positions if isinstance(positions, list | tuple) else list(positions)
        if positions and (min(positions) < 0 or max(positions) >= len(self._place)):
            self.table_slot_of(min(positions))
            self.table_slot_of(max(positions))
        return positions

    def _check_block_list(self, block_ids: Sequence[BlockId]) -> None:
        num_known = len(self.block_ids)
        if len(block_ids) < num_known or (num_known and block_ids[num_known - 1] != self.block_ids[-1]):
            raise SpecError(
                f"sync_new_tokens: block_ids of request {self.req_id!r} do not extend its block list "
                f"({len(self.block_ids)} blocks known, {len(block_ids)} given): change blocks through apply_plan"
            )

    def _add_blocks(self, new_block_ids: Sequence[BlockId]) -> None:
        self.block_ids.extend(new_block_ids)
        self.live_words.extend([0] * len(new_block_ids))
        self._position.frombytes(bytes(self._position.itemsize * self.block_size * len(new_block_ids)))
        self.layout_version += 1

    def _write_new(self, num_new: int) -> None:
        first, start, size = len(self._state), self.cursor, self.block_size
        end = start + num_new
        if num_new == 1:  # a decode step
            self._position[start] = first
            self._place.append(start)
            self._state.append(_LIVE)
        else:
            self._position[start:end] = array("i", range(first, first + num_new))
            self._place.extend(range(start, end))
            self._state.extend(bytes(num_new))
        while start < end:
            index, offset = divmod(start, size)
            count = min(size - offset, end - start)
            self.live_words[index] |= (1 << count) - 1 << offset
            start += count
        self.cursor = end
        self.num_live_tokens += num_new
