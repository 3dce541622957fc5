"""What a worker knows of dead slots after some records."""

import pytest


@pytest.mark.parametrize("size", [32, 64, 8])
def test_words_add_up_until_something_else_is_said(size):
    from vtoken_torch.vllm_plugin.lazy.told import ToldSlots
    from vtoken_torch.vllm_plugin.record import LiveWords, StepRecord

    full = (1 << size) - 1
    told = ToldSlots(size)

    def dead(req_id, *words, first=0, **record):
        told.take(StepRecord(live_words={req_id: LiveWords(first, words)}, **record))
        slots = told.dead(req_id)
        return None if slots is None else slots.tolist()

    assert told.dead("a") is None
    assert dead("a", full ^ 0b101, full ^ 1 << size - 1) == [0, 2, 2 * size - 1]
    assert dead("a", full ^ 2, first=3) == [0, 2, 2 * size - 1, 3 * size + 1]
    assert dead("a", full, full ^ 1) == [0 + size, 3 * size + 1]
    assert dead("b", full ^ 1, first=1) == [size]
    assert len(told) == 2
    assert dead("a", full ^ 8, block_ids={"a": [7, 9]}) == [3]  # a new block list: what was said before is void
    assert dead("a", full) is None
    assert dead("a", full ^ 8) == [3]
    assert dead("a") is None  # no words: no holes
    told.take(StepRecord(block_ids={"b": [4]}))
    assert len(told) == 0
    assert dead("b", 0) == list(range(size))
    told.forget(["b", "c"])
    assert told.dead("b") is None
