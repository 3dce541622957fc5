"""Chunks over paged history against their reference in float64."""

import jax.numpy as jnp
import numpy as np
import pytest
from jax_decode_world import assert_close, make_world

from vtoken_jax.kernels.prefill import paged_prefill, reference_prefill

NUM_QUERIES = 5


def place_tokens(world, seed=3):
    """Distinct positions in any physical order; the last ``NUM_QUERIES`` of each request ask."""
    rng = np.random.default_rng(seed)
    positions = np.full(len(world.planes[0]), np.iinfo(np.int32).max, np.int32)
    asking = np.full((len(world.table), NUM_QUERIES), np.iinfo(np.int32).min, np.int32)
    for request, live in enumerate(world.live):
        slots = world.slots[request][live]
        places = 7 + 2 * rng.permutation(len(slots))
        positions[slots] = places
        count = min(NUM_QUERIES, len(slots))
        asking[request, :count] = np.sort(places)[-count:] if count else []
    q = rng.standard_normal((*asking.shape, *world.q.shape[1:])).astype(world.q.dtype)
    return q, positions, asking


def run(world, q, positions, asking, weights=None, prefill=paged_prefill):
    bits, rest = world.bits, (world.table, world.num_blocks, world.live_words)
    return prefill(q, *bits, positions, *rest, asking, mass_weights=weights, **world.static)


@pytest.mark.parametrize(
    "shape",
    [
        {"held": (4, 0, 2), "heads": (4, 2)},
        {"kv_dtype": "bfloat16", "heads": (3, 1), "block_size": 8, "held": (5, 1)},
        {"kv_dtype": "float16", "block_size": 33, "q_dtype": "float32"},
    ],
    ids=str,
)
def test_a_query_sees_its_position_and_before_and_masses_are_weighted_sums(shape):
    world = make_world(**shape)
    q, positions, asking = place_tokens(world)
    weights = np.random.default_rng(1).random((len(q), 2, NUM_QUERIES)).astype(np.float32)

    out, mass = run(world, q, positions, asking, weights)

    expected_out, expected_mass = run(world, q, positions, asking, weights, reference_prefill)
    assert (out.dtype, mass.dtype) == (jnp.float32, jnp.float32)
    assert_close(out, expected_out, "float32")
    assert_close(mass, expected_mass, "float32")


def test_a_padded_query_gives_zeros_and_pays_no_mass_and_none_is_given_unless_asked():
    world = make_world()
    q, positions, asking = place_tokens(world)
    asking[:, 1:] = -1
    weights = np.ones((len(q), 1, NUM_QUERIES), np.float32)
    out, mass = run(world, q, positions, asking, weights)
    assert not np.asarray(out)[:, 1:].any()
    np.testing.assert_allclose(np.asarray(mass).sum(axis=-1)[:, 0], q.shape[2], rtol=1e-5)
    assert run(world, q, positions, asking)[1] is None


def test_a_live_nan_spoils_the_queries_that_see_it_alone():
    world = make_world(heads=(2, 1), held=(2,), live_share=1.1)
    q, positions, asking = place_tokens(world)
    clean = np.asarray(run(world, q, positions, asking)[0])
    newest = int(np.flatnonzero(positions == asking[0, -1])[0])
    world.planes[1][newest, 3] = np.nan
    out = np.asarray(run(world, q, positions, asking)[0])
    np.testing.assert_array_equal(out[0, :-1], clean[0, :-1])
    assert np.isnan(out[0, -1, :, 3]).all()
    assert np.isfinite(np.delete(out[0, -1], 3, axis=-1)).all()


def test_the_reference_is_one_decode_for_each_query_over_what_it_sees():
    world = make_world(held=(4, 0, 2), block_size=33)
    q, positions, asking = place_tokens(world)
    weights = np.random.default_rng(1).random((len(q), 2, NUM_QUERIES)).astype(np.float32)
    out, mass = run(world, q, positions, asking, weights, reference_prefill)
    live, expected_mass = world.live, np.zeros(mass.shape)
    for index in range(NUM_QUERIES):
        world.q, world.live = q[:, index], live & (positions[world.slots] <= asking[:, index, None])
        expected, paid = world.expected()
        np.testing.assert_allclose(out[:, index], expected, atol=1e-12)
        expected_mass += weights[:, :, index, None] * paid[:, None]
    np.testing.assert_allclose(mass, expected_mass, atol=1e-12)
