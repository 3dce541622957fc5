"""What the workers were told of each request's live words, held against its table (INV-8)."""

from vtoken.invariants import Violation
from vtoken.request_table import RequestTable
from vtoken.types import ReqId
from vtoken_torch.vllm_plugin.record import StepRecord

__all__ = ["ToldWords"]


class ToldWords:
    """Follows the records as a worker does. In eager mode nothing is told, and no slot up to the cursor is dead."""

    def __init__(self) -> None:
        self._words: dict[ReqId, dict[int, int]] = {}  # by index into the block list; those left out are all-live

    def forget(self, req_id: ReqId) -> None:
        """The request ended, or begins from nothing."""
        self._words.pop(req_id, None)

    def check(self, table: RequestTable, record: StepRecord) -> None:
        """Takes the record in, and compares the words up to the cursor. O(blocks)."""
        req_id, size = table.req_id, table.block_size
        told = record.live_words.get(req_id)
        if req_id in record.block_ids or (told is not None and not told.words):
            self.forget(req_id)
        if told is not None and told.words:
            self._words.setdefault(req_id, {}).update(enumerate(told.words, told.first))
        words, full = self._words.get(req_id, {}), (1 << size) - 1
        for index, expected in enumerate(table.live_words):
            before_cursor = (1 << min(max(table.cursor - index * size, 0), size)) - 1
            got = words.get(index, full) & before_cursor
            if got != expected:
                wrong = [index * size + offset for offset in range(size) if (got ^ expected) >> offset & 1]
                slots = [table.slot_at(table_slot) for table_slot in wrong]
                raise Violation(8, req_id, f"live word told of block {index}", bin(expected), bin(got), slots)
