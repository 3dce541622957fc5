import jax
import jax.numpy as jnp
import numpy as np
import pytest

from vtoken_jax.kv_cache import UNWRITTEN_POSITION, make_cache, read_tokens, storage_dtype, write_tokens

DTYPES = ["float32", "bfloat16", "float16"]


def bits(rng, spec, num_tokens):
    dtype = storage_dtype(spec.item_bytes)
    shape = (num_tokens, 2 * spec.num_layers, spec.num_kv_heads * spec.head_size)
    return rng.integers(0, np.iinfo(dtype).max, shape, dtype, endpoint=True)


def write(cache, slots, positions, kv):
    return write_tokens(cache, np.array(slots, np.int32), np.array(positions, np.int32), kv)


@pytest.mark.parametrize("dtype", DTYPES)
def test_kv_that_was_never_written_is_nan_and_has_no_position_a_query_could_reach(make_spec, dtype):
    cache = make_cache(make_spec(dtype=dtype))

    for plane in cache.planes:
        assert bool(jnp.all(jnp.isnan(jax.lax.bitcast_convert_type(plane, jnp.dtype(dtype)))))
    assert set(np.asarray(cache.positions).tolist()) == {UNWRITTEN_POSITION}


def test_the_pool_is_flat_arrays_of_integers_for_each_layer(make_spec):
    spec = make_spec(num_layers=3, dtype="bfloat16")
    cache = make_cache(spec)

    assert [len(cache.k), len(cache.v)] == [3, 3]
    assert {(plane.shape, str(plane.dtype)) for plane in cache.planes} == {((96, 16), "uint16")}
    assert len({plane.unsafe_buffer_pointer() for plane in cache.planes}) == 6


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_written_is_read_back_bit_by_bit_and_nothing_else_changes(make_spec, rng, dtype):
    spec = make_spec(dtype=dtype)
    kv, slots = bits(rng, spec, 5), [90, 4, 17, 95, 5]
    unwritten = np.asarray(read_tokens(make_cache(spec), np.arange(spec.num_slots))).copy()

    cache = write(make_cache(spec), slots, range(5), kv)

    unwritten[slots] = kv
    assert np.array_equal(read_tokens(cache, np.arange(spec.num_slots)), unwritten)
    assert np.asarray(cache.positions)[slots].tolist() == [0, 1, 2, 3, 4]


def test_layers_and_k_and_v_lie_where_the_canonical_order_says(make_spec):
    spec = make_spec(num_kv_heads=1, head_size=1)
    kv = np.arange(4, dtype=np.uint32).reshape(1, 4, 1)

    cache = write(make_cache(spec), [8], [0], kv)

    assert [int(plane[8, 0]) for plane in (cache.k[0], cache.v[0], cache.k[1], cache.v[1])] == [0, 1, 2, 3]


def test_padding_is_dropped(make_spec, rng):
    spec = make_spec()
    before = np.asarray(read_tokens(make_cache(spec), np.arange(spec.num_slots))).copy()

    cache = write(make_cache(spec), [spec.num_slots] * 3, [0] * 3, bits(rng, spec, 3))

    assert np.array_equal(read_tokens(cache, np.arange(spec.num_slots)), before)
