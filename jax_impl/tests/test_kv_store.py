import jax
import numpy as np
import pytest

from vtoken.errors import SpecError
from vtoken.types import Move
from vtoken_jax import writing
from vtoken_jax.kv_store import JaxKVStore
from vtoken_jax.native.operations import WRITE_ROWS, is_there

NATIVE = [
    pytest.param(True, marks=pytest.mark.skipif(not is_there(WRITE_ROWS), reason="no C++ compiler on this machine")),
    False,
]


def split(spec, kv):
    return tuple(kv[at : at + spec.token_bytes] for at in range(0, len(kv), spec.token_bytes))


def pointers(store):
    return [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves((store.cache, store.tables))]


def drive(store, kv, lengths=(1, 5, 17, 30)):
    """Every operation, at several lengths."""
    spec = store.spec
    for length in lengths:
        blocks = range(1, 2 + length // spec.block_size)
        slots = range(spec.block_size, spec.block_size + length)
        store.write(slots, range(length), kv[: length * spec.token_bytes])
        store.set_free(blocks, False)
        store.set_row(0, blocks, [(1 << spec.block_size) - 1] * len(blocks))
        store.set_words(0, [0], [1])
        store.move([Move(at, slot, slot + 40) for at, slot in enumerate(slots)])
        q = np.zeros(spec.query_elements, np.float32).tobytes()
        store.attend(0, q, [length])
        store.read_row(0)
        store.fingerprint_row(0)
        store.read_free()


@pytest.mark.parametrize(("dtype", "block_size"), [("float32", 1), ("bfloat16", 16), ("float16", 64), ("float32", 128)])
def test_tokens_come_back_bit_by_bit_after_writes_and_moves(make_spec, any_bits, dtype, block_size):
    spec = make_spec(dtype=dtype, block_size=block_size, num_blocks=2 + 300 // block_size)
    store, kv = JaxKVStore(spec), any_bits(spec, 70)
    first = block_size

    store.write(range(first, first + 70), range(70), kv)
    store.move([Move(at, first + at, first + 199 - at) for at in range(70)])
    words = [0] * spec.num_blocks
    for slot in range(first + 130, first + 200):
        words[slot // block_size] |= 1 << slot % block_size
    store.set_row(0, range(1, spec.num_blocks), words[1:])

    observed = store.read_row(0)
    assert observed.positions == tuple(range(69, -1, -1))
    assert observed.kv == split(spec, kv)[::-1]


def test_more_tokens_than_the_largest_piece_are_written_and_moved(make_spec, any_bits):
    spec = make_spec(block_size=128, num_blocks=20)
    store, kv = JaxKVStore(spec), any_bits(spec, 1100)

    store.write(range(128, 1228), range(1100), kv)
    store.move([Move(at, 128 + at, 1280 + at) for at in range(1100)])
    store.set_row(0, range(10, 19), [(1 << 128) - 1] * 8 + [(1 << 76) - 1])

    assert store.read_row(0).kv == split(spec, kv)


def test_operations_and_reads_leave_every_array_where_it_was(make_spec, any_bits):
    spec = make_spec()
    store = JaxKVStore(spec)
    before = pointers(store)

    drive(store, any_bits(spec, 30))

    assert pointers(store) == before


def test_nothing_is_compiled_in_the_steady_state_nor_for_a_second_store(make_spec, any_bits, num_compiles):
    spec = make_spec(head_size=2)
    fresh, kv = num_compiles(), any_bits(spec, 30)
    drive(JaxKVStore(spec), kv)
    warm = num_compiles()
    assert 0 < warm - fresh <= 13  # one for each function and size: all lengths here share one piece size

    store = JaxKVStore(spec)
    drive(store, kv, lengths=(2, 3, 7, 11, 16, 29))

    assert num_compiles() == warm


@pytest.mark.parametrize("native", NATIVE)
def test_a_buffer_may_change_once_write_has_returned(monkeypatch, make_spec, any_bits, native):
    monkeypatch.setattr(writing, "is_there", lambda _: native)
    spec = make_spec(num_layers=8, head_size=64, block_size=64)
    store, kv = JaxKVStore(spec), any_bits(spec, 64)
    store.set_row(0, [1], [(1 << 64) - 1])
    memory = np.empty(len(kv) + 64, np.uint8)
    start = -memory.ctypes.data % 64  # JAX reads memory in place if it is aligned to 64 bytes
    mutable = memoryview(memory[start : start + len(kv)])
    mutable[:] = kv
    store.write(range(64, 128), range(64), kv)  # compiles
    for _ in range(20):  # work that the next write has to wait for
        store.move([Move(at, 200 + at, 600 + at) for at in range(300)])

    store.write(range(64, 128), range(64), mutable)
    mutable[:] = bytes(len(mutable))

    assert store.read_row(0).kv == split(spec, kv)


def every_second(kv):
    """A view of ``kv`` with as many bytes between its own."""
    return memoryview(bytes(byte for pair in zip(kv, kv[::-1], strict=True) for byte in pair))[::2]


@pytest.mark.parametrize("native", NATIVE)
@pytest.mark.parametrize("view", [bytes, bytearray, memoryview, every_second])
def test_every_kind_of_buffer_is_taken(monkeypatch, make_spec, any_bits, native, view):
    monkeypatch.setattr(writing, "is_there", lambda _: native)
    spec = make_spec()
    store, kv = JaxKVStore(spec), any_bits(spec, 2)
    store.set_row(0, [1], [0b11])

    store.write([4, 5], [0, 1], view(kv))

    assert store.read_row(0).kv == split(spec, kv)
    assert len(store.attend(0, view(bytes(4 * spec.query_elements)), [1]).out) == spec.query_elements


@pytest.mark.parametrize(
    ("num_positions", "num_bytes"), [(1, 512), (3, 512), (2, 511), (2, 513), (2, 256), (2, 0)], ids=str
)
def test_what_is_written_has_to_be_as_long_as_its_slots(make_spec, num_positions, num_bytes):
    store = JaxKVStore(make_spec())
    with pytest.raises(SpecError, match=f"2 slots, {num_positions} positions and {num_bytes} bytes.* give 2 .* 512"):
        store.write([4, 5], range(num_positions), bytes(num_bytes))


@pytest.mark.parametrize("native", NATIVE)
def test_no_tokens_are_written_as_well(monkeypatch, make_spec, native):
    monkeypatch.setattr(writing, "is_there", lambda _: native)
    store = JaxKVStore(make_spec())
    store.write([], [], b"")
    assert store.read_row(0).kv == ()


def test_bookkeeping_takes_less_than_a_hundredth_of_the_pool(make_spec):
    spec = make_spec(num_layers=30, num_kv_heads=3, num_query_heads=9, head_size=64, block_size=16, max_num_reqs=16)
    store = JaxKVStore(spec)

    side = sum(leaf.nbytes for leaf in (*store.tables, store.cache.positions))

    assert side < 0.01 * spec.num_slots * spec.token_bytes
