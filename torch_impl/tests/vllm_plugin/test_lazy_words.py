"""Live words of a table as they are told, and what verification says of them."""

import pytest

from vtoken.invariants import Violation
from vtoken.request_table import RequestTable
from vtoken_torch.vllm_plugin.lazy.words import changed_words, live_slots, whole_words
from vtoken_torch.vllm_plugin.record import LiveWords, StepRecord
from vtoken_torch.vllm_plugin.verify.words import ToldWords


def _table(dead=(1, 17, 25)):
    table = RequestTable("a", 8)
    table.sync_new_tokens([10, 11, 12, 13], 28)
    table.evict_tokens(dead)
    return table


@pytest.mark.parametrize("size", [8, 12, 72])
def test_live_slots_are_the_tables_own(size):
    table = RequestTable("a", size)
    table.sync_new_tokens([3, 9, 4], 2 * size + 5)
    table.evict_tokens(range(0, 2 * size + 5, 3))
    assert live_slots(table).tolist() == list(table.live_table_slots())


def test_words_count_what_is_written_later_as_live():
    table = _table()
    assert changed_words(table, {3}) == LiveWords(3, (0xFF ^ 2,))  # 4 of its 8 slots are written
    assert changed_words(table, {2, 0}) == LiveWords(0, (0xFF ^ 2, 0xFF, 0xFF ^ 2))
    assert whole_words(table) == LiveWords(0, (0xFF ^ 2, 0xFF, 0xFF ^ 2, 0xFF ^ 2))
    table.sync_new_tokens(table.block_ids, 31)
    assert changed_words(table, {3}) == LiveWords(3, (0xFF ^ 2,))
    assert whole_words(_table(dead=(17,))) == LiveWords(0, (0xFF, 0xFF, 0xFF ^ 2))
    assert whole_words(_table(dead=())) == LiveWords(0, ())


def test_verification_follows_what_was_told():
    table, told = _table(), ToldWords()
    told.check(table, StepRecord(live_words={"a": whole_words(table)}))
    told.check(table, StepRecord())
    table.evict_tokens([9])
    with pytest.raises(Violation, match=r"INV-8: request 'a', live word told of block 1: expected 0b11111101"):
        told.check(table, StepRecord(live_words={"a": changed_words(table, {2})}))
    told.check(table, StepRecord(live_words={"a": changed_words(table, {1})}))
    told.forget("a")
    with pytest.raises(Violation, match="live word told of block 0"):
        told.check(table, StepRecord())
    with pytest.raises(Violation, match="block 0"):  # a block list without its words
        told.check(table, StepRecord(block_ids={"a": table.block_ids}))
    told.check(_table(dead=()), StepRecord(live_words={"a": LiveWords(0, ())}))
