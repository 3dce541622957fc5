import numpy as np
import pytest

from vtoken_jax.kv_store import JaxKVStore


def layout(store, row):
    observed = store.read_row(row)
    return observed.block_ids, observed.live_words


@pytest.mark.parametrize("block_size", [1, 31, 32, 33, 128])
def test_words_of_every_block_size_come_back(make_spec, block_size):
    store = JaxKVStore(make_spec(block_size=block_size, num_blocks=6))
    full, ends = (1 << block_size) - 1, 1 | 1 << (block_size - 1)

    store.set_row(2, [5, 1, 3], [full, 0, ends])
    assert layout(store, 2) == ((5, 1, 3), (full, 0, ends))

    store.set_words(2, [0, 1], [ends, full])
    assert layout(store, 2) == ((5, 1, 3), (ends, full, ends))


def test_positions_come_in_table_order_low_offset_first(make_spec, any_bits):
    spec = make_spec()
    store = JaxKVStore(spec)
    store.write([20, 21, 22, 23, 8, 9, 10, 11], range(8), any_bits(spec, 8))

    store.set_row(0, [5, 2], [0b1010, 0b0101])

    assert store.read_row(0).positions == (1, 3, 4, 6)


def test_a_rewritten_row_keeps_nothing_and_its_neighbours_stay(make_spec):
    spec = make_spec()
    store = JaxKVStore(spec)
    for row in range(spec.max_num_reqs):
        store.set_row(row, range(1, 24), [0b1111] * 23)

    store.set_row(1, [7], [0b0001])
    store.set_row(2, (), ())

    assert layout(store, 1) == ((7,), (0b0001,))
    assert layout(store, 2) == ((), ())
    assert layout(store, 0) == layout(store, 3) == (tuple(range(1, 24)), (0b1111,) * 23)
    tables = store.tables
    assert np.asarray(tables.block_table)[1:3].tolist() == [[7] + [0] * 22, [0] * 23]
    assert np.asarray(tables.live_words)[1:3].tolist() == [[1] + [0] * 22, [0] * 23]
    assert np.asarray(tables.num_blocks).tolist() == [23, 1, 0, 23]


def test_more_blocks_than_the_largest_piece_are_flagged_and_updated(make_spec):
    spec = make_spec(num_layers=1, num_kv_heads=1, head_size=1, block_size=1, num_blocks=1500)
    store = JaxKVStore(spec)

    store.set_free(range(1, 1500), True)
    store.set_free([3, 1499], False)
    assert store.read_free() == frozenset(range(1, 1500)) - {3, 1499}

    store.set_row(0, range(1, 1500), [0] * 1499)
    store.set_words(0, range(1200), [1] * 1200)
    assert store.read_row(0).live_words == (1,) * 1200 + (0,) * 299


def test_no_blocks_and_no_words_change_nothing(make_spec):
    store = JaxKVStore(make_spec())
    store.set_row(0, [1], [1])

    store.set_words(0, [], [])
    store.set_free([], True)
    store.move([])

    assert layout(store, 0) == ((1,), (1,))
    assert store.read_free() == frozenset()
