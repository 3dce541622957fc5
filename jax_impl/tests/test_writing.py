import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vtoken.executor import KVSpec
from vtoken_jax import writing
from vtoken_jax.kv_cache import make_cache, read_tokens, write_tokens
from vtoken_jax.native.operations import WRITE_ROWS, is_there
from vtoken_jax.writing import make_writer, write_rows

needs_native = pytest.mark.skipif(not is_there(WRITE_ROWS), reason="no C++ compiler on this machine")
NATIVE = [pytest.param(True, marks=needs_native), False]
DTYPES = ["float32", "bfloat16", "float16"]
SIGNALLING_NAN = {"float32": b"\x01\x00\x80\x7f", "bfloat16": b"\x81\x7f", "float16": b"\x01\x7c"}


def shape(dtype="float32", head_size=16, num_blocks=8):
    """Rows of 64 bytes and more are whole cache lines; those of ``head_size=3`` are none."""
    return KVSpec(
        num_layers=2, num_kv_heads=2, num_query_heads=2, head_size=head_size, dtype=dtype, block_size=4,
        num_blocks=num_blocks,
    )  # fmt: skip


def any_kv(spec, num_tokens, offset=0):
    """Random bits, a signalling NaN at the head of each token, ``offset`` bytes behind where an array begins."""
    kv = np.random.default_rng(0).integers(0, 256, (num_tokens, spec.token_bytes), np.uint8)
    kv[:, : spec.item_bytes] = np.frombuffer(SIGNALLING_NAN[spec.dtype], np.uint8)
    memory = np.zeros(kv.size + 128, np.uint8)
    start = -memory.ctypes.data % 64 + offset
    memory[start : start + kv.size] = kv.ravel()
    return memoryview(memory)[start : start + kv.size]


def all_tokens(cache):
    """``[num_slots, token_bytes]``, and the positions."""
    tokens = np.array(read_tokens(cache, np.arange(len(cache.positions))))
    return tokens.reshape(len(tokens), -1).view(np.uint8), np.array(cache.positions)


def writer_of(spec, native):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(writing, "is_there", lambda _: native)
        return make_writer(spec, "cpu")


def check(spec, slots, native, offset=0):
    tokens, positions = all_tokens(make_cache(spec))
    kv = any_kv(spec, len(slots), offset)
    tokens[slots] = np.frombuffer(kv, np.uint8).reshape(len(slots), -1)
    positions[slots] = 70 + np.arange(len(slots))

    cache = writer_of(spec, native)(
        make_cache(spec), np.array(slots, np.int32), 70 + np.arange(len(slots), dtype=np.int32), kv
    )

    written, places = all_tokens(cache)
    assert np.array_equal(written, tokens)
    assert np.array_equal(places, positions)


@pytest.mark.parametrize("native", NATIVE)
@pytest.mark.parametrize("dtype", DTYPES)
@settings(max_examples=30, deadline=None)
@given(
    slots=st.lists(st.integers(0, 31), unique=True, min_size=1),
    head_size=st.sampled_from([3, 16]),
    offset=st.sampled_from([0, 1, 16, 63]),
)
def test_tokens_lie_bit_by_bit_in_any_slots_and_nothing_else_changes(native, dtype, slots, head_size, offset):
    check(shape(dtype, head_size), slots, native, offset)


@pytest.mark.parametrize("native", NATIVE)
@pytest.mark.parametrize("count", [1, 64, 65, 1024, 2500])
def test_any_number_is_written_in_few_shapes(native, count):
    write_rows.clear_cache()
    write_tokens.clear_cache()
    spec = shape(num_blocks=640)

    check(spec, np.random.default_rng(1).permutation(spec.num_slots)[:count], native)

    assert write_rows._cache_size() == native
    assert write_tokens._cache_size() <= (0 if native else 2)


@needs_native
@pytest.mark.parametrize("slots", [[5, 32], [5, -1]])
def test_compiled_writes_touch_no_memory_outside_the_pool(slots):
    spec = shape()
    write, places = writer_of(spec, True), np.arange(2, dtype=np.int32)
    with pytest.raises(
        (ValueError, jax.errors.JaxRuntimeError), match=f"token 1 in slot {slots[1]} leaves the 32 slots"
    ):
        write(make_cache(spec), np.array(slots, np.int32), places, any_kv(spec, 2))


@needs_native
def test_compiled_writes_want_four_words():
    with pytest.raises((ValueError, jax.errors.JaxRuntimeError), match="told has 24 bytes"):
        jax.block_until_ready(write_rows(make_cache(shape()), np.zeros(6, np.uint32)))


@needs_native
@pytest.mark.parametrize("dtype", DTYPES)
def test_compiled_writes_happen_in_the_same_memory_and_take_no_other(dtype):
    spec = shape(dtype)
    cache = jax.block_until_ready(make_cache(spec))
    before = [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(cache)]

    after = writer_of(spec, True)(cache, np.array([9], np.int32), np.array([0], np.int32), any_kv(spec, 1))

    assert [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(after)] == before
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(cache))
    memory = write_rows.lower(after, np.zeros(8, np.uint32)).compile().memory_analysis()
    assert memory.temp_size_in_bytes <= 8 * len(before)  # where the arrays lie
    assert memory.alias_size_in_bytes == spec.num_slots * (spec.token_bytes + 4)


@needs_native
def test_compiled_writes_leave_an_array_alone_that_was_not_given_away():
    """JAX arrays do not change: XLA copies one that is not donated, and the copy is what is written to."""
    spec, kv = shape(), any_kv(shape(), 2)
    cache = make_cache(spec)
    tokens, positions = all_tokens(cache)
    lists = np.array([3, 4], np.int32), np.array([0, 1], np.int32), np.frombuffer(kv, np.uint8)
    told = np.array([2, *(each.ctypes.data for each in lists)], np.uint64).view(np.uint32)

    written = jax.block_until_ready(jax.jit(write_rows.__wrapped__)(cache, told))

    assert np.array_equal(all_tokens(cache)[0], tokens)
    assert np.array_equal(all_tokens(cache)[1], positions)
    assert np.array_equal(all_tokens(written)[0][[3, 4]].ravel(), lists[2])


@needs_native
def test_the_compiled_code_is_for_the_cpu_alone():
    assert make_writer(shape(), "cpu").__class__ is writing._NativeWriter
    assert make_writer(shape(), "gpu").func is writing._write_by_xla


@needs_native
def test_what_is_being_read_is_kept_if_the_wait_is_broken_off(monkeypatch):
    """XLA may still read it; the next write, which comes after, lets it go."""
    spec = shape()
    write, lists = writer_of(spec, True), (np.array([9], np.int32), np.array([0], np.int32), any_kv(spec, 1))
    whole, broken = make_cache(spec), make_cache(spec)
    with monkeypatch.context() as patch:
        patch.setattr(type(whole.positions), "block_until_ready", lambda _: exec("raise KeyboardInterrupt"))
        with pytest.raises(KeyboardInterrupt):
            write(broken, *lists)
    assert [part is given for part, given in zip(write._lists, lists, strict=False)][:2] == [True, True]

    write(whole, *lists)
    assert write._lists == ()
