"""Where one request's tokens lie: its block list, live words, and both directions of the mapping (paper §3.2).

Places are kept as *table slots*, counted along the request's block list, so that most changes of the list cost
nothing and none needs a look-up by block id.

    position       0 1 2 3 4 5 6 7 ...      computed tokens, fixed for life
    _place         table slot of each       (a dead token keeps its last one)
    table slot     0 1 2 3 | 4 5 6 7 | ...  block_ids[i] owns [i * block_size, (i + 1) * block_size)
    _position      position written there   (a hole keeps its last one)
    live_words     one word a block         bit o: slot o is live; doomed tokens are
    cursor         next append; every live token lies before it
"""

from array import array
from collections.abc import Iterator, Sequence

from vtoken.errors import SpecError
from vtoken.reclamation.plan import ReclamationPlan
from vtoken.types import BlockId, Move, Position, ReqId, SlotId, cdiv, set_bits

__all__ = ["TableLayout"]

_WORD_BITS = 64


class TableLayout:
    """Places of one request's live tokens, and the commit of plans that change them. Owns no block: the pool does."""

    def __init__(self, req_id: ReqId, block_size: int) -> None:
        self.req_id = req_id
        self.block_size = block_size
        self.block_ids: list[BlockId] = []
        # array("Q") keeps a word in 8 bytes; blocks of more than 64 slots need Python's long integers.
        self.live_words: array[int] | list[int] = array("Q") if block_size <= _WORD_BITS else []
        self.cursor = 0
        self.num_live_tokens = 0
        self.layout_version = 0
        self.liveness_version = 0
        self.plan_in_flight = False
        self._place = array("i")
        self._position = array("i")

    # -- reading -----------------------------------------------------------------------------------------------------

    @property
    def fragmentation(self) -> float:
        """F = 1 - live slots / held slots (paper §2), for this request alone."""
        held = len(self.block_ids) * self.block_size
        return 1 - self.num_live_tokens / held if held else 0.0

    @property
    def is_packed(self) -> bool:
        """Live tokens fill the first slots of the block list, and no block is held beyond them."""
        return self.cursor == self.num_live_tokens and len(self.block_ids) == cdiv(self.cursor, self.block_size)

    def position_at(self, table_slot: int) -> Position:
        """Position whose KV lies in a live table slot."""
        return self._position[table_slot]

    def slot_at(self, table_slot: int) -> SlotId:
        """Pool slot of a table slot."""
        index, offset = divmod(table_slot, self.block_size)
        return self.block_ids[index] * self.block_size + offset

    def table_slot_of(self, position: Position) -> int:
        """Table slot of a computed token; of a dead one, the last that it had."""
        if not 0 <= position < len(self._place):
            raise SpecError(
                f"position {position} of request {self.req_id!r} is not computed yet: it has {len(self._place)} tokens"
            )
        return self._place[position]

    def slots_of(self, positions: Sequence[Position]) -> list[SlotId]:
        """Pool slots of live tokens, in the given order."""
        size, block_ids, place = self.block_size, self.block_ids, self._place
        return [block_ids[place[position] // size] * size + place[position] % size for position in positions]

    def live_table_slots(self) -> Iterator[int]:
        """Table slots of live tokens in physical order."""
        for index, word in enumerate(self.live_words):
            yield from set_bits(word, index * self.block_size)

    def live_slots(self) -> list[SlotId]:
        """Pool slots of live tokens in physical order."""
        return [self.slot_at(index) for index in self.live_table_slots()]

    def live_positions(self) -> list[Position]:
        """Positions of live tokens in physical order."""
        return [self._position[index] for index in self.live_table_slots()]

    def packed_positions(self) -> "array[int]":
        """Positions by table slot, a copy: those of the live tokens where live tokens fill the first slots."""
        return self._position[: self.cursor]

    def num_blocks_needed(self, num_tokens: int) -> int:
        """Blocks that an append of ``num_tokens`` must add."""
        return max(0, cdiv(self.cursor + num_tokens, self.block_size) - len(self.block_ids))

    # -- plans -------------------------------------------------------------------------------------------------------

    def check_plan(self, plan: ReclamationPlan) -> None:
        """Refuses a plan that does not fit this layout any more (INV-4, INV-5). O(blocks + moves), changes nothing."""
        self._checked_index(plan)

    def _checked_index(self, plan: ReclamationPlan) -> dict[BlockId, int]:
        if self.plan_in_flight:
            raise SpecError(f"INV-4: request {self.req_id!r} has a plan in flight: settle it before the next")
        if plan.req_id != self.req_id:
            raise SpecError(f"plan of request {plan.req_id!r} was handed to request {self.req_id!r}")
        seen = (plan.layout_version, plan.liveness_version, plan.num_live_tokens)
        current = (self.layout_version, self.liveness_version, self.num_live_tokens)
        if seen[0] != current[0] or (plan.packed and seen != current):
            raise SpecError(
                f"INV-4: the plan of request {self.req_id!r} was made at (layout, liveness, live tokens) = {seen}, "
                f"they are {current} now: plan again"
            )
        index_of = {block: index for index, block in enumerate(self.block_ids)}
        self._check_blocks(plan, index_of)
        self._check_moves(plan, index_of)
        if plan.packed:
            self._check_packed(plan, index_of)
        return index_of

    def _check_blocks(self, plan: ReclamationPlan, index_of: dict[BlockId, int]) -> None:
        freed, new = plan.freed_block_ids, plan.new_block_ids
        if len({*freed, *new}) != len(freed) + len(new):
            raise SpecError(f"plan of request {self.req_id!r} names a block twice: frees {freed}, adds {new}")
        for block in freed:
            if block not in index_of:
                raise SpecError(f"plan frees block {block}, which request {self.req_id!r} does not hold")
        for block in new:
            if block in index_of:
                raise SpecError(f"plan adds block {block}, which request {self.req_id!r} holds already")
        if not plan.packed and self.block_ids and self.block_ids[-1] in freed:
            raise SpecError(
                f"plan frees the tail block {self.block_ids[-1]} of request {self.req_id!r}: the cursor is in it"
            )

    def _check_moves(self, plan: ReclamationPlan, index_of: dict[BlockId, int]) -> None:
        size, freed, new = self.block_size, set(plan.freed_block_ids), set(plan.new_block_ids)
        left = {block: self.live_words[index_of[block]].bit_count() for block in freed}
        sources, destinations = set(), set()
        for position, src_slot, dst_slot in plan.moves:
            src_block, src_offset = divmod(src_slot, size)
            index = index_of.get(src_block, -1)
            is_live = index >= 0 and self.live_words[index] >> src_offset & 1
            if not is_live or self._position[index * size + src_offset] != position:
                raise SpecError(
                    f"plan moves position {position} of request {self.req_id!r} from slot {src_slot}: not live there"
                )
            dst_block, dst_offset = divmod(dst_slot, size)
            index = index_of.get(dst_block, -1)
            is_hole = plan.packed and index >= 0 and not self.live_words[index] >> dst_offset & 1
            if not ((is_hole and dst_block not in freed) or dst_block in new):  # SPEC T-5
                raise SpecError(
                    f"INV-5: plan of request {self.req_id!r} moves position {position} to slot {dst_slot}: no hole"
                )
            if src_slot in sources or dst_slot in destinations:
                raise SpecError(f"INV-5: plan of request {self.req_id!r} names slot {src_slot} or {dst_slot} twice")
            sources.add(src_slot)
            destinations.add(dst_slot)
            if src_block in freed:
                left[src_block] -= 1
        stranded = sorted(block for block, count in left.items() if count)
        if stranded:
            raise SpecError(
                f"INV-1: plan of request {self.req_id!r} frees blocks {stranded} with live tokens left in them"
            )

    def _check_packed(self, plan: ReclamationPlan, index_of: dict[BlockId, int]) -> None:
        """As many blocks as the live tokens need, and none behind the last one's share: then all others are full."""
        freed, size = set(plan.freed_block_ids), self.block_size
        held = [block for block in self.block_ids if block not in freed]
        held.extend(plan.new_block_ids)
        needed, rest = cdiv(self.num_live_tokens, size), self.num_live_tokens % size
        word = 0
        if rest and held:
            first, index = held[-1] * size, index_of.get(held[-1])
            word = 0 if index is None else self.live_words[index]
            for _, src_slot, dst_slot in plan.moves:
                if 0 <= src_slot - first < size:
                    word &= ~(1 << src_slot - first)
                if 0 <= dst_slot - first < size:
                    word |= 1 << dst_slot - first
        if len(held) != needed or word >> (rest or size):
            raise SpecError(
                f"INV-4: plan of request {self.req_id!r} says that it packs {self.num_live_tokens} live tokens into "
                f"{needed} blocks, it leaves {len(held)} with live tokens behind the last: plan again"
            )

    def apply_plan(self, plan: ReclamationPlan) -> None:
        """Commits a plan when its copies are enqueued: all or nothing. The caller frees and takes its blocks."""
        index_of = self._checked_index(plan)
        for move in plan.moves:
            block, offset = divmod(move.src_slot, self.block_size)
            self.live_words[index_of[block]] &= ~(1 << offset)
        old_length = len(self.block_ids)
        if plan.freed_block_ids or plan.new_block_ids:
            self._change_blocks(plan)
            index_of = {block: index for index, block in enumerate(self.block_ids)}
        for move in plan.moves:
            block, offset = divmod(move.dst_slot, self.block_size)
            self._put(move, index_of[block], offset)
        self.cursor = (
            self.num_live_tokens if plan.packed else self.cursor + (len(self.block_ids) - old_length) * self.block_size
        )
        self.layout_version += 1
        self.plan_in_flight = True

    def plan_done(self) -> None:
        """The copies of the plan in flight have ended."""
        self.plan_in_flight = False

    def _put(self, move: Move, index: int, offset: int) -> None:
        table_slot = index * self.block_size + offset
        self.live_words[index] |= 1 << offset
        self._position[table_slot] = move.position
        self._place[move.position] = table_slot

    def _change_blocks(self, plan: ReclamationPlan) -> None:
        """Drops freed blocks and inserts new ones; tokens behind the first change get their new table slots."""
        freed, size = set(plan.freed_block_ids), self.block_size
        kept = [index for index, block in enumerate(self.block_ids) if block not in freed]
        at = len(kept) if plan.packed or not kept else len(kept) - 1
        order: list[int | None] = [*kept[:at], *[None] * len(plan.new_block_ids), *kept[at:]]
        first = next((index for index, old in enumerate(order) if old != index), len(order))
        old_ids, old_words, old_position = (
            self.block_ids[first:],
            self.live_words[first:],
            self._position[first * size :],
        )
        del self.block_ids[first:], self.live_words[first:], self._position[first * size :]
        fresh, place, position_of = iter(plan.new_block_ids), self._place, self._position
        for index, old in enumerate(order[first:], start=first):
            if old is None:
                self.block_ids.append(next(fresh))
                self.live_words.append(0)
                position_of.frombytes(bytes(position_of.itemsize * size))
                continue
            self.block_ids.append(old_ids[old - first])
            self.live_words.append(old_words[old - first])
            position_of.extend(old_position[(old - first) * size : (old - first + 1) * size])
            for table_slot in set_bits(old_words[old - first], index * size):
                place[position_of[table_slot]] = table_slot
