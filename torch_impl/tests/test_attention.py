import numpy as np
import pytest
import torch

from vtoken_torch.attention import attend_slots
from vtoken_torch.kv_cache import KVCache

TOLERANCE = {"float32": 1e-5, "bfloat16": 2**-7, "float16": 2**-10}  # of the largest reference value (SPEC A-4)


def oracle(q, keys, values, positions, query_positions):
    """Attention in float64, one query head at a time, over the visible tokens alone.

    q [num_queries, num_layers, num_query_heads, head_size]; keys, values [num_layers, num_tokens, num_kv_heads,
    head_size]. Returns out, shaped like q, and mass [num_tokens].
    """
    out, mass = np.zeros(q.shape), np.zeros(len(positions))
    group = q.shape[2] // keys.shape[2]
    for query, layer, head in np.ndindex(q.shape[:3]):
        seen = np.flatnonzero(positions <= query_positions[query])
        if not len(seen):
            continue
        logits = keys[layer, seen, head // group] @ q[query, layer, head] / np.sqrt(q.shape[3])
        weights = np.exp(logits - logits.max())
        weights /= weights.sum()
        out[query, layer, head] = weights @ values[layer, seen, head // group]
        mass[seen] += weights / q.shape[1]
    return out, mass


def world(spec, device, slots, positions, seed=0):
    """A cache whose other slots hold NaN, with random tokens at ``slots``; keys and values as float64."""
    cache = KVCache(spec, device)
    generator = torch.Generator().manual_seed(seed)
    shape = (len(slots), spec.num_kv_heads, spec.head_size)
    keys, values = [], []
    index = torch.tensor(slots, dtype=torch.int64, device=device)
    for layer in range(spec.num_layers):
        for plane, rows in ((cache.keys(layer), keys), (cache.values(layer), values)):
            plane[index] = torch.randn(shape, generator=generator).to(device, plane.dtype)
            rows.append(plane[index].double().cpu().numpy())
    cache.positions[index] = torch.tensor(positions, dtype=torch.int32, device=device)
    return cache, np.reshape(keys, (spec.num_layers, *shape)), np.reshape(values, (spec.num_layers, *shape))


def attend(cache, slots, q, query_positions):
    return attend_slots(
        cache,
        torch.tensor(slots, dtype=torch.int64, device=cache.device),
        torch.from_numpy(q).to(cache.device),
        torch.tensor(query_positions, dtype=torch.int32, device=cache.device),
    )


def queries(spec, num_queries, seed=1):
    shape = (num_queries, spec.num_layers, spec.num_query_heads, spec.head_size)
    return np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)


def check(attention, expected, shape, tolerance):
    out, mass = expected
    got = np.reshape(attention.out, shape)
    assert np.isfinite(got).all()
    assert np.abs(got - out).max(initial=0) <= tolerance * np.abs(out).max(initial=0)
    np.testing.assert_allclose(np.array(attention.mass), mass, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("num_query_heads", "num_kv_heads"), [(4, 4), (6, 2), (9, 3), (5, 1)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_attention_matches_float64_whatever_the_grouping(make_spec, device, dtype, num_query_heads, num_kv_heads):
    spec = make_spec(dtype=dtype, num_query_heads=num_query_heads, num_kv_heads=num_kv_heads, block_size=16)
    slots = np.random.default_rng(0).permutation(np.arange(16, spec.num_slots))[:40].tolist()
    positions = np.arange(40) * 2
    cache, keys, values = world(spec, device, slots, positions.tolist())
    q = queries(spec, 1)
    attention = attend(cache, slots, q, [78])
    check(attention, oracle(q, keys, values, positions, [78]), q.shape, TOLERANCE[dtype])
    assert attention.positions == tuple(positions)
    assert sum(attention.mass) == pytest.approx(num_query_heads, rel=1e-5)


@pytest.mark.parametrize("seed", range(5))
def test_a_query_sees_by_position_not_by_place(make_spec, device, seed):
    spec = make_spec(num_layers=3)
    rng = np.random.default_rng(seed)
    slots = rng.permutation(np.arange(4, spec.num_slots))[:20].tolist()
    positions = rng.permutation(20)
    cache, keys, values = world(spec, device, slots, positions.tolist(), seed)
    q = queries(spec, 6, seed)
    query_positions = list(range(14, 20))
    attention = attend(cache, slots, q, query_positions)
    check(attention, oracle(q, keys, values, positions, query_positions), q.shape, TOLERANCE["float32"])
    assert attention.positions == tuple(positions)
    assert sum(attention.mass) == pytest.approx(6 * spec.num_query_heads, rel=1e-5)


def test_a_query_that_sees_nothing_gives_zeros_beside_one_that_does(make_spec, device):
    spec = make_spec()
    cache, keys, values = world(spec, device, [9], [7])
    q = queries(spec, 2)
    attention = attend(cache, [9], q, [6, 7])
    got = np.reshape(attention.out, q.shape)
    assert not got[0].any()
    check(attention, oracle(q, keys, values, np.array([7]), [6, 7]), q.shape, TOLERANCE["float32"])
    assert attention.mass[0] == pytest.approx(spec.num_query_heads)


def test_without_a_live_token_the_output_is_zero_and_there_is_no_mass(make_spec, device):
    spec = make_spec()
    attention = attend(KVCache(spec, device), [], queries(spec, 3), [4, 5, 6])
    assert list(attention.out) == [0.0] * (3 * spec.query_elements)
    assert attention.positions == ()
    assert len(attention.mass) == 0


def test_large_logits_do_not_overflow(make_spec, device):
    spec = make_spec()
    slots, positions = [4, 5, 6, 7], np.arange(4)
    cache, keys, values = world(spec, device, slots, positions.tolist())
    q = queries(spec, 1) * np.float32(300)
    attention = attend(cache, slots, q, [3])
    check(attention, oracle(q, keys, values, positions, [3]), q.shape, 1e-4)  # logits of 1e3 carry fewer digits
