"""The scheduler's books in lazy mode: a death marks its slot, and a plan moves survivors into fresh blocks (SPEC R-6).

A request's slots end at its table's cursor, holes included, so that vLLM's counts are shortened by what evacuation
closed, not by what died.
"""

from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence

from vllm.v1.request import Request

from vtoken.invariants import Violation, check_plan
from vtoken.reclamation.plan import ReclamationPlan
from vtoken.request_table import RequestTable
from vtoken.types import BlockId, Position, ReqId, cdiv
from vtoken_torch.vllm_plugin.kv_spec import EvictingManager
from vtoken_torch.vllm_plugin.lazy.words import changed_words, live_slots, whole_words
from vtoken_torch.vllm_plugin.ledger import Ledger
from vtoken_torch.vllm_plugin.record import StepRecord

__all__ = ["LazyLedger"]


class LazyLedger(Ledger):
    """Tables that may have holes. Shared blocks may too: nothing is ever copied out of them, nor given back."""

    def __init__(
        self, manager: EvictingManager, requests: Mapping[ReqId, Request], count: Callable[[ReqId], int]
    ) -> None:
        super().__init__(manager, requests, count)
        manager.num_dead = {}  # a dead token keeps its slot, so that it is none of ``num_evicted``
        self._changed_blocks: dict[ReqId, set[int]] = {}  # whose words the workers do not know yet, by index

    def finish(self, req_id: ReqId) -> None:
        super().finish(req_id)
        self._changed_blocks.pop(req_id, None)
        self.manager.num_dead.pop(req_id, None)

    preempt = finish

    def with_holes(self) -> list[ReqId]:
        """Requests with dead tokens that still have their slots."""
        return [req_id for req_id in self.manager.num_dead if self.num_holes(req_id)]

    def num_holes(self, req_id: ReqId) -> int:
        """Slots of dead tokens."""
        return self.manager.num_dead.get(req_id, 0) - self.manager.num_evicted.get(req_id, 0)

    def packed_positions(self, req_id: ReqId) -> "array[int]":
        """Positions of the live tokens in the order of their slots (``columns``)."""
        table = self.table(req_id)
        positions = table.packed_positions()
        return array("i", map(positions.__getitem__, live_slots(table).tolist()))

    def columns(self, req_id: ReqId) -> Sequence[int] | None:
        """Where the live tokens stand among all slots up to the cursor; None if there is no hole."""
        return live_slots(self.table(req_id)).tolist() if self.num_holes(req_id) else None

    def num_used_slots(self, num_live: int, num_listed_again: int) -> int:
        """Slots that hold a token which is live for some holder. O(blocks) where blocks are shared."""
        if not num_listed_again:
            return num_live
        words: dict[BlockId, int] = {}
        for table in self.tables.values():
            for block_id, word in zip(table.block_ids, table.live_words, strict=True):
                words[block_id] = words.get(block_id, 0) | word
        return sum(word.bit_count() for word in words.values())

    # -- what an Evictor drives --------------------------------------------------------------------------------------

    def kill(self, req_id: ReqId, positions: Iterable[Position]) -> list[Position]:
        """Marks. Attention skips these from this pass's step on."""
        table = self.table(req_id)
        killed = table.evict_tokens(positions)
        if killed:
            self.manager.num_dead[req_id] = table.num_computed_tokens - table.num_live_tokens
            changed = self._changed_blocks.setdefault(req_id, set())
            changed.update(table.table_slot_of(position) // table.block_size for position in killed)
        return killed

    def killable(self, req_id: ReqId, victims: Sequence[Position], may_copy: bool) -> Sequence[Position]:
        """All of them: a mark takes no block."""
        return victims

    def launch(self, plan: ReclamationPlan) -> None:
        """Commits an evacuation; all words are told with the new block list."""
        check_plan(plan, self.table(plan.req_id))
        super().launch(plan)
        table = self._tables[plan.req_id]
        left_out = table.num_computed_tokens - table.cursor
        self.manager.num_evicted[plan.req_id] = self._record.num_evicted[plan.req_id] = left_out
        self._changed_blocks.setdefault(plan.req_id, set())

    def num_blocks_needed(self, req_id: ReqId, num_tokens: int) -> int:
        """Counts slots up to the cursor."""
        num_slots = self.count(req_id) - self.manager.num_evicted.get(req_id, 0) + num_tokens
        return max(0, cdiv(num_slots, self.spec.block_size) - len(self.manager.req_to_blocks[req_id]))

    # -- for the pass ------------------------------------------------------------------------------------------------

    def check_layout(self, table: RequestTable) -> None:
        """INV-4 at rest in lazy mode: the cursor lies in the block list. Drafts may have slots behind it."""
        num_blocks = cdiv(table.cursor, table.block_size)
        if len(table.block_ids) < num_blocks:
            raise Violation(4, table.req_id, "blocks up to the cursor", num_blocks, len(table.block_ids))

    def num_left_out(self, req_id: ReqId) -> int:
        """Dead tokens that have no slot any more."""
        return self.manager.num_evicted.get(req_id, 0)

    def take_record(self) -> StepRecord:
        """With the live words that this pass changed."""
        record = super().take_record()
        for req_id, blocks in self._changed_blocks.items():
            table = self._tables[req_id]
            is_whole = req_id in record.block_ids
            record.live_words[req_id] = whole_words(table) if is_whole else changed_words(table, blocks)
        self._changed_blocks.clear()
        return record
