from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vtoken.executor import KVSpec
from vtoken_jax import compaction
from vtoken_jax.compaction import make_mover, move_rows, move_tokens
from vtoken_jax.kv_cache import KVCache, make_cache, read_tokens, storage_dtype, write_tokens
from vtoken_jax.native.operations import MOVE_ROWS, is_there

NUM_SLOTS = 32
PADDED = 16
needs_native = pytest.mark.skipif(not is_there(MOVE_ROWS), reason="no C++ compiler on this machine")
NATIVE = [pytest.param(True, marks=needs_native), False]


def filled(dtype, seed=0):
    """A pool whose every bit is random, NaN of all payloads (signalling ones too) among the elements."""
    spec = KVSpec(num_layers=2, num_kv_heads=2, num_query_heads=2, head_size=4, dtype=dtype, block_size=4, num_blocks=8)
    rng, unsigned = np.random.default_rng(seed), storage_dtype(spec.item_bytes)
    kv = rng.integers(0, np.iinfo(unsigned).max, (NUM_SLOTS, 4, 8), unsigned, endpoint=True)
    signalling_nan = {"float32": 0x7F800001, "bfloat16": 0x7F81, "float16": 0x7C01}[dtype]
    kv[:, :, 0] = signalling_nan
    slots = np.arange(NUM_SLOTS, dtype=np.int32)
    return write_tokens(make_cache(spec), slots, 100 + slots, kv), kv


def by_xla(cache, pairs):
    padded = [*pairs, *[(0, NUM_SLOTS)] * (PADDED - len(pairs))]
    return move_tokens(cache, *np.array(padded, np.int32).T)


def natively(cache, pairs):
    """Whatever lies behind the moves is none."""
    padded = [*pairs, *[(at, -7) for at in range(PADDED - len(pairs))]]
    return move_rows(cache, *np.array(padded, np.int32).T, np.int32(len(pairs)))


def check(dtype, pairs, move):
    cache, kv = filled(dtype)

    cache = move(cache, pairs)

    place = np.arange(NUM_SLOTS)
    place[[d for _, d in pairs]] = [s for s, _ in pairs]
    assert np.array_equal(read_tokens(cache, np.arange(NUM_SLOTS)), kv[place])
    assert np.asarray(cache.positions).tolist() == (100 + place).tolist()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize(
    "pairs",
    [
        [],
        [(31, 4)],
        [(5, 4), (6, 5), (7, 6)],
        [(4, 5), (5, 6), (6, 7)],
        [(8, 9), (9, 8)],
        [(30, 0), (29, 1), (28, 2), (27, 3)],
    ],
    ids=["none", "one", "shift_down", "shift_up", "swap", "fill_from_the_tail"],
)
def test_bits_and_positions_move_together_and_all_at_once(dtype, pairs):
    check(dtype, pairs, by_xla)


@settings(max_examples=50, deadline=None)
@given(st.permutations(range(NUM_SLOTS)), st.integers(0, PADDED))
def test_disjoint_moves_are_right_for_any_choice_of_slots(slots, count):
    check("bfloat16", list(zip(slots[:count], slots[PADDED : PADDED + count], strict=True)), by_xla)


@needs_native
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@settings(max_examples=50, deadline=None)
@given(slots=st.permutations(range(NUM_SLOTS)), count=st.integers(0, PADDED))
def test_compiled_moves_are_right_for_any_choice_of_slots(dtype, slots, count):
    check(dtype, list(zip(slots[:count], slots[PADDED : PADDED + count], strict=True)), natively)


@needs_native
@pytest.mark.parametrize(
    ("pairs", "count", "message"),
    [
        ([(0, 5), (1, NUM_SLOTS)], 2, f"move 1 from slot 1 to {NUM_SLOTS} leaves the {NUM_SLOTS} slots"),
        ([(-1, 5)], 1, "move 0 from slot -1 to 5"),
        ([(0, 5)], 2, "count=2 is no number"),
        ([(0, 5)], -1, "count=-1 is no number"),
    ],
)
def test_compiled_moves_touch_no_memory_outside_the_pool(pairs, count, message):
    cache = filled("float32")[0]
    with pytest.raises((ValueError, jax.errors.JaxRuntimeError), match=message):
        jax.block_until_ready(move_rows(cache, *np.array(pairs, np.int32).T, np.int32(count)))


@needs_native
@pytest.mark.parametrize(
    ("shape", "message"), [((), "array 2 has no slots"), ((NUM_SLOTS - 1,), "array 2 has another number of slots")]
)
def test_compiled_moves_refuse_arrays_that_are_no_pool(shape, message):
    planes = [jax.numpy.zeros((NUM_SLOTS, 8)) for _ in range(2)]
    cache = KVCache((planes[0],), (planes[1],), jax.numpy.zeros(shape, np.int32))
    slots = np.array([3], np.int32)
    with pytest.raises((ValueError, jax.errors.JaxRuntimeError), match=message):
        jax.block_until_ready(move_rows(cache, slots, slots + 9, np.int32(1)))


@needs_native
def test_a_slot_outside_is_refused_on_a_shape_that_has_run_before_too():
    """JAX then takes another way through its own code, and another type of error."""
    good, bad = (np.array([3], np.int32), np.array([5], np.int32)), (np.array([3], np.int32), np.array([99], np.int32))
    cache = filled("float32")[0]
    for _ in range(2):
        cache = jax.block_until_ready(move_rows(cache, *good, np.int32(1)))
    with pytest.raises((ValueError, jax.errors.JaxRuntimeError), match="move 0 from slot 3 to 99 leaves the 32 slots"):
        jax.block_until_ready(move_rows(cache, *bad, np.int32(1)))


@needs_native
def test_compiled_moves_leave_an_array_alone_that_was_not_given_away():
    """JAX arrays do not change: XLA copies one that is not donated, and the copy is what is changed in place."""
    cache, kv = filled("float32")
    slots = np.array([3, 4], np.int32)

    moved = jax.jit(move_rows.__wrapped__)(cache, slots, slots + 9, np.int32(2))

    assert np.array_equal(read_tokens(cache, np.arange(NUM_SLOTS)), kv)
    assert np.array_equal(read_tokens(moved, slots + 9), kv[slots])


@pytest.mark.parametrize("native", NATIVE)
@pytest.mark.parametrize("count", [0, 1, 16, 17, 300, 4096, 4500])
def test_a_mover_moves_any_number_in_few_shapes(monkeypatch, native, count):
    monkeypatch.setattr(compaction, "is_there", lambda _: native)
    move_rows.clear_cache()
    move_tokens.clear_cache()
    spec = KVSpec(
        num_layers=1, num_kv_heads=3, num_query_heads=3, head_size=64, dtype="float32", block_size=16, num_blocks=640
    )
    slots = np.random.default_rng(0).permutation(spec.num_slots).astype(np.int32)
    src, dst = slots[:count], slots[count : 2 * count]
    cache = make_cache(spec)._replace(positions=jax.numpy.arange(spec.num_slots, dtype=np.int32))

    cache = make_mover(spec, "cpu")(cache, src, dst)

    place = np.arange(spec.num_slots)
    place[dst] = src
    assert np.array_equal(cache.positions, place)
    used, other = (move_rows, move_tokens) if native else (move_tokens, move_rows)
    assert used._cache_size() <= 2
    assert other._cache_size() == 0


@needs_native
def test_the_compiled_code_is_for_the_cpu_alone():
    spec = KVSpec(
        num_layers=1, num_kv_heads=1, num_query_heads=1, head_size=8, dtype="float32", block_size=4, num_blocks=8
    )
    assert make_mover(spec, "cpu") is not make_mover(spec, "gpu")
    assert make_mover(spec, "gpu").func is compaction._move_by_xla


def in_a_function(cache, *moves):
    return jax.jit(lambda *arguments: move_rows(*arguments))(cache, *moves)


def in_a_loop(cache, *moves):
    return jax.jit(lambda cache: jax.lax.fori_loop(0, 3, lambda _, turned: move_rows(turned, *moves), cache))(cache)


@needs_native
@pytest.mark.parametrize("move", [move_rows, in_a_function, in_a_loop])
@pytest.mark.parametrize(
    "setting", [nullcontext, jax.disable_jit, lambda: jax.enable_x64(True)], ids=["plain", "no_jit", "x64"]
)
def test_compiled_moves_are_an_operation_like_any_other(move, setting):
    cache, kv = filled("bfloat16")
    slots = np.arange(PADDED)
    with setting():
        moved = move(cache, slots, slots + PADDED, PADDED)
        assert np.array_equal(read_tokens(moved, slots + PADDED), kv[:PADDED])
        assert moved.positions.dtype == np.int32


@needs_native
def test_compiled_moves_happen_on_the_device_of_the_cache():
    device = jax.devices()[-1]
    cache, kv = filled("float32")
    slots = np.arange(PADDED, dtype=np.int32)
    moved = move_rows(jax.device_put(cache, device), slots, slots + PADDED, np.int32(PADDED))
    assert moved.positions.devices() == {device}
    assert np.array_equal(read_tokens(moved, slots + PADDED), kv[:PADDED])


def turned(seed):
    """A pool of as many arrays as a model has, whose tokens move to and fro, as many as several threads take up."""
    spec = KVSpec(
        num_layers=30, num_kv_heads=3, num_query_heads=3, head_size=64, dtype="float32", block_size=16, num_blocks=70
    )
    slots = np.arange(512, dtype=np.int32)
    kv = np.random.default_rng(seed).integers(0, 2**32, (512, 60, 192), np.uint32)
    cache = jax.device_put(make_cache(spec), jax.devices()[seed % len(jax.devices())])
    cache = write_tokens(cache, slots, slots, kv)
    for turn in range(20):
        src, dst = (slots, slots + 512) if turn % 2 == 0 else (slots + 512, slots)
        cache = move_rows(cache, src, dst[::-1].copy(), np.int32(512))
    return np.array_equal(read_tokens(cache, slots), kv) and np.array_equal(cache.positions[:512], slots)


@needs_native
def test_threads_of_the_pool_share_large_moves_and_nothing_is_lost():
    assert turned(0)


@needs_native
def test_callers_that_share_the_threads_of_the_pool_do_not_wait_for_one_another():
    """More calls under way than threads: whoever waited for one to come free would wait for ever."""
    with ThreadPoolExecutor(4) as callers:
        assert all(callers.map(turned, range(4)))
