import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vtoken.errors import SpecError
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
    expected = expected_slots(block_ids, words, block_size)
    assert tables.live_slots(2).tolist() == expected
    assert tables.read_row(1) == ((), ())
    tables.set_row(0, [3], [1])
    slots, counts = tables.find_live([2, 1, 0])
    assert (slots.tolist(), counts) == ([*expected, 3 * block_size], [len(expected), 0, 1])
    assert tables.most_blocks([1, 2]) == len(block_ids)
    live = [offset for block in range(len(words)) for offset in set_bits(words[block] << block * block_size)]
    if live and live == list(range(len(live))):
        needed = [block if index * block_size < len(live) else block_ids[0] for index, block in enumerate(block_ids)]
        assert [part.tolist() for part in tables.find_blocks([2])] == [[needed], [len(live)]]
    else:
        assert tables.find_blocks([2]) is None


@pytest.mark.parametrize(("block_size", "words"), [(4, (15, 15, 3)), (33, (2**33 - 1, 2**33 - 1, 2**32 - 1))])
def test_blocks_of_rows_without_holes(make_spec, device, block_size, words):
    tables = DeviceTables(make_spec(block_size=block_size), device)
    tables.set_row(0, [3, 8, 5], words)
    tables.set_row(1, [7], [1])
    blocks, counts = tables.find_blocks([1, 0])
    assert blocks.tolist() == [[7, 3, 3], [3, 8, 5]]
    assert counts.tolist() == [1, 2 * block_size + words[2].bit_count()]
    for row, hole in enumerate([(15, 14, 3), (15, 7, 3), (14, 0, 0), (0, 0, 0), (3, 4, 0)]):
        tables.set_row(2, [1, 2, 4], hole)
        assert tables.find_blocks([0, 2]) is None, row
        assert tables.find_blocks([0]) is not None


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


def test_changes_stay_on_the_host_until_somebody_reads_then_all_go_up_at_once(make_spec, device):
    tables = DeviceTables(make_spec(), device)
    before = tables.state.clone()
    tables.set_free(range(1, 9), True)
    tables.set_row(0, [3, 5], [15, 1])
    tables.set_row(2, [4], [3])
    tables.set_words(0, [1], [3])
    tables.append([0, 2], [6, 2])
    assert tables.state.equal(before)
    assert tables.read_row(0) == ((3, 5), (15, 7))
    assert tables.read_row(2) == ((4,), (7,))
    assert tables.read_free() == set(range(1, 9))
    assert (tables.num_uploads, tables.num_rows_rebuilt, tables.num_incremental) == (1, 2, 3)


def test_a_decode_step_rebuilds_only_rows_whose_blocks_change(make_spec, device):
    """One word for each row in one upload, whatever the number of rows, and no upload where nothing changes."""
    spec = make_spec(max_num_reqs=40, num_blocks=200)
    tables = DeviceTables(spec, device)
    for row in range(40):
        tables.set_row(row, [1 + 3 * row, 2 + 3 * row], [15, 1])
    tables.flush()
    tables.flush()
    assert (tables.num_uploads, tables.num_rows_rebuilt, tables.num_incremental) == (1, 40, 0)
    for step in range(3):
        tables.append(range(40), [5 + step] * 40)
        tables.flush()
    assert (tables.num_uploads, tables.num_rows_rebuilt, tables.num_incremental) == (4, 40, 120)
    tables.set_row(7, [22, 23, 24], [15, 15, 1])
    tables.append([row for row in range(40) if row != 7 and row % 2], [4] * 19)
    tables.flush()
    assert (tables.num_uploads, tables.num_rows_rebuilt, tables.num_incremental) == (5, 41, 139)
    assert tables.read_row(7) == ((22, 23, 24), (15, 15, 1))
    assert tables.read_row(8) == ((25, 26), (15, 15))


@pytest.mark.parametrize("block_size", [4, 32, 128])
def test_tokens_appended_together_are_the_words_set_one_by_one(make_spec, device, block_size):
    spec, rng = make_spec(block_size=block_size), random.Random(block_size)
    together, one_by_one = DeviceTables(spec, device), DeviceTables(spec, device)
    words = [0] * 3
    for tables in (together, one_by_one):
        tables.set_row(1, [2, 4, 6], words)
    slots = rng.sample(range(3 * block_size), 2 * block_size)
    together.append([1] * len(slots), slots)
    together.append([], [])
    for slot in slots:
        words[slot // block_size] |= 1 << slot % block_size
    one_by_one.set_words(1, range(3), words)
    assert together.read_row(1) == one_by_one.read_row(1) == ((2, 4, 6), tuple(words))


@pytest.mark.parametrize("seed", range(3))
def test_staged_changes_end_as_if_each_had_gone_up_alone(make_spec, device, seed):
    rng = random.Random(seed)
    staged, alone = DeviceTables(make_spec(block_size=33), device), DeviceTables(make_spec(block_size=33), device)
    sizes = [0] * 4
    for _ in range(60):
        row, call = rng.randrange(4), rng.randrange(4)
        if call == 0:
            sizes[row] = rng.randrange(9)
            blocks = rng.sample(range(1, 9), sizes[row])
            change = ("set_row", row, blocks, [rng.getrandbits(33) for _ in blocks])
        elif call == 1:
            indices = rng.sample(range(sizes[row]), sizes[row] // 2)
            change = ("set_words", row, indices, [rng.getrandbits(33) for _ in indices])
        elif call == 2:
            change = ("append", [row] * bool(sizes[row]), [rng.randrange(33 * sizes[row])] if sizes[row] else [])
        else:
            change = ("set_free", rng.sample(range(1, 9), 3), rng.random() < 0.5)
        for tables in (staged, alone):
            getattr(tables, change[0])(*change[1:])
        alone.flush()
        if rng.random() < 0.1:
            staged.flush()
    staged.flush()
    assert staged.state.equal(alone.state)
    assert staged.num_uploads < alone.num_uploads


def test_changes_that_nobody_reads_do_not_pile_up(make_spec, device):
    tables = DeviceTables(make_spec(), device)
    tables.set_row(0, [3, 5], [0, 0])
    for number in range(20_000):
        tables.set_words(0, [number % 2], [number % 16])
    assert len(tables._staged) < 5000
    assert tables.num_uploads < 10
    assert tables.read_row(0) == ((3, 5), (14, 15))
    assert tables.num_incremental == 20_000


def test_addresses_stay(make_spec, device):
    tables = DeviceTables(make_spec(), device)
    before = [table.data_ptr() for table in (tables.block_table, tables.num_blocks, tables.live_words, tables.free)]
    tables.set_row(1, [1, 2], [1, 2])
    tables.set_free([3], True)
    after = [table.data_ptr() for table in (tables.block_table, tables.num_blocks, tables.live_words, tables.free)]
    assert before == after


def test_rows_may_be_narrower_than_the_pool(make_spec, device):
    tables = DeviceTables(make_spec(), device, max_blocks_per_req=2)
    assert tables.block_table.shape == (4, 2)
    tables.set_row(3, [8, 1], [15, 1])
    assert tables.read_row(3) == ((8, 1), (15, 1))
    with pytest.raises(SpecError, match="a request holds 3 blocks, max_blocks_per_req=2: raise it, or evict more"):
        tables.set_row(3, [8, 1, 2], [15, 1, 0])
    with pytest.raises(SpecError, match="max_blocks_per_req=0: give at least 1"):
        DeviceTables(make_spec(), device, max_blocks_per_req=0)
