import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vtoken.types import set_bits
from vtoken_torch.device_tables import DeviceTables

BLOCK_SIZES = [1, 2, 16, 31, 32, 33, 64, 65, 128]


def expected_slots(block_ids, words, block_size):
    return [
        block * block_size + offset for block, word in zip(block_ids, words, strict=True) for offset in set_bits(word)
    ]


@pytest.mark.parametrize("block_size", BLOCK_SIZES)
@settings(max_examples=20, deadline=None)
@given(data=st.data())
def test_a_row_reads_back_as_it_was_written(make_spec, device, block_size, data):
    spec = make_spec(block_size=block_size)
    tables = DeviceTables(spec, device)
    block_ids = data.draw(st.lists(st.integers(1, 8), unique=True))
    words = [data.draw(st.integers(0, (1 << block_size) - 1)) for _ in block_ids]
    tables.set_row(2, block_ids, words)
    assert tables.read_row(2) == (tuple(block_ids), tuple(words))
    assert tables.live_slots(2).tolist() == expected_slots(block_ids, words, block_size)
    assert tables.read_row(1) == ((), ())


@pytest.mark.parametrize("block_size", BLOCK_SIZES)
def test_full_blocks_keep_their_highest_slot(make_spec, device, block_size):
    tables = DeviceTables(make_spec(block_size=block_size), device)
    tables.set_row(0, [3], [(1 << block_size) - 1])
    assert tables.live_slots(0).tolist() == list(range(3 * block_size, 4 * block_size))


@pytest.mark.parametrize("block_size", [4, 33, 128])
def test_words_change_at_the_given_indices_only(make_spec, device, block_size):
    tables = DeviceTables(make_spec(block_size=block_size), device)
    rng = random.Random(block_size)
    words = [rng.getrandbits(block_size) for _ in range(5)]
    tables.set_row(0, [5, 4, 3, 2, 1], words)
    words[1], words[4] = rng.getrandbits(block_size), 0
    tables.set_words(0, [1, 4], [words[1], words[4]])
    tables.set_words(0, [], [])
    assert tables.read_row(0) == ((5, 4, 3, 2, 1), tuple(words))


def test_a_rewritten_row_keeps_nothing_of_the_request_before(make_spec, device):
    tables = DeviceTables(make_spec(), device)
    tables.set_row(0, [1, 2, 3], [15, 15, 15])
    tables.set_row(0, [7], [1])
    assert tables.read_row(0) == ((7,), (1,))
    assert tables.block_table[0].tolist() == [7, 0, 0, 0, 0, 0, 0, 0]  # padded with the null block
    assert not tables.live_words[0, 1:].any()
    tables.set_row(0, (), ())
    assert not tables.block_table.any()
    assert tables.live_slots(0).tolist() == []


def test_a_shared_block_may_be_dead_for_one_holder_and_alive_for_another(make_spec, device):
    tables = DeviceTables(make_spec(), device)
    tables.set_row(0, [6], [0b1111])
    tables.set_row(1, [6], [0b0101])
    assert tables.live_slots(0).tolist() == [24, 25, 26, 27]
    assert tables.live_slots(1).tolist() == [24, 26]


def test_free_flags_follow_each_call(make_spec, device):
    tables = DeviceTables(make_spec(), device)
    tables.set_free(range(1, 9), True)
    tables.set_free([2, 5], False)
    tables.set_free([], False)
    tables.set_free([5], True)
    assert tables.read_free() == {1, 3, 4, 5, 6, 7, 8}
