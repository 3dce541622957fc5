"""Blocks that others hold too, or find in the prefix cache: which tokens in them may die in a pass.

Such a block is never written (INV-7). Where a token of it dies, what is left must be copied out into own blocks (SPEC
R-5). That takes free blocks, and gives none back while the others hold it.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence

from vtoken.reclamation.fill import num_fresh_blocks
from vtoken.request_table import RequestTable
from vtoken.types import Position, ReqId
from vtoken_torch.vllm_plugin.pool import VllmPool

__all__ = ["MAX_COPIED_BLOCKS", "Sharing"]

MAX_COPIED_BLOCKS = 16
"""Shared blocks that one pass copies out of at most, over all requests: no more bytes than a prefill chunk of sixteen
blocks writes, so that a step in which many requests leave one long prefix is not much longer than any other."""


class Sharing:
    """Splits kills into what can be packed at once and what waits.

    Attributes:
        reserved: free blocks that the plans of this pass will take, by request.
    """

    def __init__(self, pool: VllmPool) -> None:
        self.reserved: dict[ReqId, int] = {}
        self._pool = pool
        self._num_left = MAX_COPIED_BLOCKS

    def begin_pass(self) -> None:
        """A new scheduling pass."""
        self.reserved.clear()
        self._num_left = MAX_COPIED_BLOCKS

    def killable(self, table: RequestTable, victims: Sequence[Position], may_copy: bool) -> Sequence[Position]:
        """Those of the victims that can die now; reserves the blocks that the plan will take. O(blocks + victims).

        All victims in private blocks, and those that leave nothing of a shared one. Of the other shared blocks, the
        ones with the least left, as long as free blocks last and the pass's ``MAX_COPIED_BLOCKS``; none if not
        ``may_copy``: under pressure a copy takes memory and frees none.

        Own cached blocks (``VllmPool.keeps_hashed``) are copied out of while there is room, then leave the cache.
        """
        others = self._pool.not_private(table.block_ids)
        if not others:
            return victims
        doomed = _by_block(table, victims)
        cached = [index for index in others if self._pool.is_held_once(table.block_ids[index])]
        num_targets = self._pool.num_targets - sum(self.reserved.values()) + self.reserved.get(table.req_id, 0)
        after, num_left, crowded = _After(table), self._num_left, []
        allowed = doomed.keys() - others
        for index in allowed:
            after.kill(index, doomed[index])
        if num_fresh_blocks(after, self._pool) > num_targets:
            if not cached:
                return [victim for victim in victims if not table.is_live(victim)]
            crowded = cached
        rests = {index: (table.live_words[index] & ~doomed[index]).bit_count() for index in doomed.keys() - allowed}
        for index in sorted(() if crowded else rests, key=lambda index: (rests[index], index)):
            is_copied = rests[index] > 0 and index not in cached
            if is_copied and not (may_copy and num_left):
                continue
            after.kill(index, doomed[index])
            if num_fresh_blocks(after, self._pool) <= num_targets:
                allowed.add(index)
                num_left -= is_copied
                continue
            after.revive(index, doomed[index])
            if index in cached:
                crowded.append(index)
        if crowded:
            self._pool.forget_hashes(table.block_ids[index] for index in crowded)
            return self.killable(table, victims, may_copy)
        self._num_left, self.reserved[table.req_id] = num_left, num_fresh_blocks(after, self._pool)
        size, waiting = table.block_size, doomed.keys() - allowed
        return [each for each in victims if not table.is_live(each) or table.table_slot_of(each) // size not in waiting]


def _by_block(table: RequestTable, victims: Iterable[Position]) -> dict[int, int]:
    """The victims' places: by index in the table's block list, one bit for each slot."""
    found: defaultdict[int, int] = defaultdict(int)
    for victim in victims:
        if table.is_live(victim):
            index, offset = divmod(table.table_slot_of(victim), table.block_size)
            found[index] |= 1 << offset
    return found


class _After:
    """What a planner would see of a table once some of its tokens are dead."""

    def __init__(self, table: RequestTable) -> None:
        self.block_size = table.block_size
        self.block_ids = table.block_ids
        self.live_words = list(table.live_words)
        self.num_live_tokens = table.num_live_tokens

    def kill(self, index: int, word: int) -> None:
        self.live_words[index] &= ~word
        self.num_live_tokens -= word.bit_count()

    def revive(self, index: int, word: int) -> None:
        self.live_words[index] |= word
        self.num_live_tokens += word.bit_count()
