import jax.numpy as jnp
import numpy as np
import pytest

from vtoken_jax.kv_store import JaxKVStore

NAN = float("nan")


def oracle(spec, q, query_positions, kv, positions):
    """Attention in float64, one query, layer and head at a time; kv: [tokens, layers, 2, kv_heads, head_size]."""
    group = spec.num_query_heads // spec.num_kv_heads
    out, mass = np.zeros(q.shape), np.zeros(len(positions))
    for (index, layer, head), _ in np.ndenumerate(q[..., 0]):
        seen = [at for at, position in enumerate(positions) if position <= query_positions[index]]
        if seen:
            keys, values = (kv[seen, layer, which, head // group].astype(np.float64) for which in (0, 1))
            logits = keys @ q[index, layer, head].astype(np.float64) / np.sqrt(spec.head_size)
            weights = np.exp(logits - logits.max())
            weights /= weights.sum()
            out[index, layer, head] = weights @ values
            mass[seen] += weights / spec.num_layers
    return out, mass


def random_kv(spec, rng, num_tokens):
    shape = (num_tokens, spec.num_layers, 2, spec.num_kv_heads, spec.head_size)
    return rng.standard_normal(shape).astype(jnp.dtype(spec.dtype))


def make_store(spec, kv, slots, positions, dead=()):
    """Row 1 holds the blocks of ``slots`` in the order of their first use; slots in ``dead`` have no live bit."""
    store = JaxKVStore(spec)
    store.write(slots, positions, kv.tobytes())
    block_ids = list(dict.fromkeys(slot // spec.block_size for slot in slots))
    words = dict.fromkeys(block_ids, 0)
    for slot in set(slots) - set(dead):
        words[slot // spec.block_size] |= 1 << slot % spec.block_size
    store.set_row(1, block_ids, [words[block] for block in block_ids])
    physical = [(block_ids.index(slot // spec.block_size), slot % spec.block_size) for slot in slots]
    order = sorted((at for at, slot in enumerate(slots) if slot not in dead), key=lambda at: physical[at])
    return store, order


def check(spec, rng, slots, positions, query_positions, dead=()):
    kv = random_kv(spec, rng, len(slots))
    kv[[at for at, slot in enumerate(slots) if slot in dead]] = NAN
    store, order = make_store(spec, kv, slots, positions, dead)
    shape = (len(query_positions), spec.num_layers, spec.num_query_heads, spec.head_size)
    q = rng.standard_normal(shape).astype(np.float32)

    got = store.attend(1, q.tobytes(), query_positions)

    live = [positions[at] for at in order]
    out, mass = oracle(spec, q, query_positions, kv[order], live)
    assert list(got.positions) == live
    assert (got.out.typecode, got.mass.typecode) == ("f", "f")
    np.testing.assert_allclose(np.reshape(got.out, shape), out, rtol=0, atol=1e-5 * max(1.0, np.abs(out).max()))
    np.testing.assert_allclose(got.mass, mass, rtol=0, atol=1e-5 * max(1.0, mass.max(initial=0)))
    return got


@pytest.mark.parametrize(
    ("dtype", "query_heads", "kv_heads"),
    [("float32", 4, 4), ("float16", 4, 2), ("bfloat16", 6, 2), ("float32", 6, 2), ("bfloat16", 4, 1)],
)
def test_every_query_head_reads_the_kv_head_of_its_group(make_spec, rng, dtype, query_heads, kv_heads):
    spec = make_spec(dtype=dtype, num_query_heads=query_heads, num_kv_heads=kv_heads)
    check(spec, rng, [8, 9, 10, 11, 40, 41], [0, 1, 2, 3, 4, 5], [5])


@pytest.mark.parametrize("block_size", [1, 33, 128])
def test_dead_slots_never_leak_even_when_they_hold_nan(make_spec, rng, block_size):
    spec = make_spec(block_size=block_size, num_blocks=-(-300 // block_size))
    slots = rng.permutation(np.arange(block_size, 2 * block_size + 100))[:90].tolist()
    check(spec, rng, slots, list(range(90)), [89], dead=set(slots[::3]))


def test_slots_that_were_never_written_never_leak(make_spec, rng):
    spec = make_spec(block_size=16, num_blocks=4)
    got = check(spec, rng, [16, 40], [0, 1], [1])
    assert np.isfinite(got.out).all()


@pytest.mark.parametrize("num_queries", [1, 2, 4, 5, 20])
def test_a_query_sees_by_position_whatever_the_physical_order(make_spec, rng, num_queries):
    spec = make_spec(block_size=4)
    slots = rng.permutation(np.arange(4, 92))[:40].tolist()
    check(spec, rng, slots, list(range(40)), list(range(40 - num_queries, 40)), dead=set(slots[5:11]))


def test_a_live_token_that_a_query_does_not_see_cannot_spoil_it(make_spec, rng):
    spec = make_spec()
    kv = random_kv(spec, rng, 4)
    kv[3] = NAN
    store, _ = make_store(spec, kv, [4, 5, 6, 7], [0, 1, 2, 3])
    q = rng.standard_normal((2, spec.num_layers, spec.num_query_heads, spec.head_size)).astype(np.float32)

    out = np.reshape(store.attend(1, q.tobytes(), [2, 3]).out, q.shape)

    expected, _ = oracle(spec, q[:1], [2], kv[:3], [0, 1, 2])
    np.testing.assert_allclose(out[:1], expected, atol=1e-5)
    assert np.isnan(out[1]).all()


def test_a_query_that_sees_nothing_gives_zeros_and_no_mass(make_spec, rng):
    spec = make_spec()
    got = check(spec, rng, [4, 5], [6, 7], [5, 6])
    assert not any(got.out[: spec.query_elements])
    assert got.mass[1] == 0.0


def test_a_request_without_live_tokens_gives_zeros(make_spec, rng):
    got = check(make_spec(), rng, [4, 5], [0, 1], [1], dead={4, 5})
    assert (len(got.positions), len(got.mass)) == (0, 0)
    assert not any(got.out)


def test_a_request_without_blocks_gives_zeros(make_spec):
    spec = make_spec()
    got = JaxKVStore(spec).attend(2, np.ones(spec.query_elements, np.float32).tobytes(), [7])
    assert (len(got.positions), len(got.mass)) == (0, 0)
    assert len(got.out) == spec.query_elements
    assert not any(got.out)


def test_mass_adds_up_to_queries_times_query_heads(make_spec, rng):
    spec = make_spec(num_query_heads=6)
    got = check(spec, rng, list(range(8, 30)), list(range(22)), [19, 20, 21])
    assert sum(got.mass) == pytest.approx(3 * 6, rel=1e-5)


def test_a_long_row_in_a_large_pool_is_seen_whole(make_spec, rng):
    spec = make_spec(num_layers=1, block_size=16, num_blocks=128)
    slots = rng.permutation(np.arange(16, 16 * 128))[:700].tolist()
    check(spec, rng, slots, list(range(700)), [698, 699], dead=set(slots[::7]))
