"""Bytes, their meaning, attention and the fingerprint, against values computed by hand or by other code."""

import math
import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vtoken.executor import KVSpec
from vtoken.fingerprint import sequence_fingerprint
from vtoken_conformance.attention import attention
from vtoken_conformance.bits import BIT_MODES, decode, is_moderate, is_special, make_queries, make_token
from vtoken_conformance.fingerprint import fingerprint

DTYPES = ("float32", "bfloat16", "float16")


def make_spec(dtype="float32", num_kv_heads=2, num_query_heads=4, num_layers=2, head_size=8):
    return KVSpec(
        num_layers=num_layers,
        num_kv_heads=num_kv_heads,
        num_query_heads=num_query_heads,
        head_size=head_size,
        dtype=dtype,
        block_size=4,
        num_blocks=5,
    )


@pytest.mark.parametrize("dtype", DTYPES)
def test_finite_tokens_lie_between_a_sixteenth_and_one(dtype):
    numbers = np.abs(decode(b"".join(make_token(make_spec(dtype), "finite", "k", p) for p in range(50)), dtype))
    assert numbers.min() >= 2**-4
    assert numbers.max() < 1
    assert len(np.unique(numbers)) > 100


@pytest.mark.parametrize("dtype", DTYPES)
def test_special_tokens_hold_nan_infinity_and_denormals_at_every_fourth_position(dtype):
    spec = make_spec(dtype)
    assert [is_special(position) for position in range(5)] == [False, False, False, True, False]
    with np.errstate(invalid="ignore"):
        special = decode(make_token(spec, "special", "k", 3), dtype)
    assert np.isnan(special).any()
    assert np.isinf(special).any()
    assert (special == 0).any()
    assert not is_moderate(make_token(spec, "special", "k", 3), dtype)
    assert is_moderate(make_token(spec, "special", "k", 2), dtype)


@pytest.mark.parametrize("bits", BIT_MODES)
def test_bytes_depend_on_every_part_of_a_name_and_on_nothing_else(bits):
    spec = make_spec()
    token = make_token(spec, bits, "0/a/1", 4)
    make_token.cache_clear()
    assert token == make_token(spec, bits, "0/a/1", 4)
    others = {make_token(spec, bits, key, p) for key, p in (("0/a/1", 5), ("1/a/1", 4), ("0/b/1", 4), ("0/a/2", 4))}
    assert len(others | {token}) == 5


def test_decode_reads_bfloat16_as_the_upper_half_of_float32():
    assert decode(struct.pack("<4H", 0x3F80, 0xC000, 0x3DCD, 0x0000), "bfloat16").tolist() == [1, -2, 0.10009765625, 0]
    assert decode(struct.pack("<2e", 1.5, -0.25), "float16").tolist() == [1.5, -0.25]
    assert decode(struct.pack("<2f", 1.5, -0.25), "float32").tolist() == [1.5, -0.25]


def test_attention_of_two_tokens_by_hand():
    spec = make_spec(num_kv_heads=1, num_query_heads=1, num_layers=1, head_size=2)
    kv = {0: struct.pack("<4f", 1, 0, 10, 20), 5: struct.pack("<4f", 0, 1, 30, 40)}  # K, then V
    q = np.array([2, 0], np.float32).tobytes()
    out, mass = attention(spec, kv, q, [5])
    weight = math.exp(2 / math.sqrt(2)) / (math.exp(2 / math.sqrt(2)) + 1)
    assert mass == pytest.approx({0: weight, 5: 1 - weight})
    assert out.ravel().tolist() == pytest.approx([10 * weight + 30 * (1 - weight), 20 * weight + 40 * (1 - weight)])


def test_a_query_sees_no_later_token_and_zeros_if_it_sees_none():
    spec = make_spec(num_kv_heads=1, num_query_heads=1, num_layers=1, head_size=2)
    kv = {3: struct.pack("<4f", 1, 0, 10, 20), 5: struct.pack("<4f", 0, 1, 30, 40)}
    q = np.ones((3, 2), np.float32).tobytes()
    out, mass = attention(spec, kv, q, [2, 3, 5])
    assert out[0].ravel().tolist() == [0, 0]
    assert out[1].ravel().tolist() == [10, 20]
    assert out[2].ravel().tolist() == pytest.approx([20, 30])
    assert mass == pytest.approx({3: 1.5, 5: 0.5})
    assert attention(spec, {}, q, [2, 3, 5])[0].tolist() == np.zeros((3, 1, 1, 2)).tolist()


def test_each_query_head_reads_the_kv_head_of_its_group():
    spec = make_spec(num_layers=1, head_size=1)
    kv = {0: struct.pack("<4f", 0, 0, 7, 9)}  # two keys, two values
    out, _ = attention(spec, kv, make_queries(spec, "q", 1), [0])
    assert out.ravel().tolist() == [7, 7, 9, 9]


@pytest.mark.parametrize("dtype", DTYPES)
def test_mass_sums_to_queries_times_query_heads(dtype):
    spec = make_spec(dtype)
    kv = {position: make_token(spec, "finite", "k", position) for position in (0, 2, 9, 4)}
    _, mass = attention(spec, kv, make_queries(spec, "q", 3), [7, 8, 9])
    assert sum(mass.values()) == pytest.approx(12)


@given(st.dictionaries(st.integers(0, 2**31), st.binary(min_size=8, max_size=8), max_size=5))
def test_the_fingerprint_is_that_of_the_spec_in_plain_integers(kv):
    assert fingerprint(kv) == sequence_fingerprint(kv.items())


def test_the_fingerprint_by_hand():
    # One token of one word 0 at position 0: fmix32(0 ^ fmix32(1)) under both salts; fmix32(1) = 0x514e28b7.
    assert fingerprint({0: b"\0\0"}) == "2fef5c8f2fef5c8f"
    assert fingerprint({}) == "0" * 16
    assert fingerprint({3: b"ab", 4: b"cd"}) == fingerprint({4: b"cd", 3: b"ab"})
    assert fingerprint({3: b"ab", 4: b"cd"}) != fingerprint({4: b"ab", 3: b"cd"})


def words(*formula):
    """A token's words from SPEC's formula ``(p * a + j * b) mod 65536``: a, b, number of words, position."""
    a, b, count, position = formula
    return struct.pack(f"<{count}H", *((position * a + j * b) % 65536 for j in range(count)))


@pytest.mark.parametrize(
    ("kv", "golden"),
    [
        ({0: struct.pack("<2f", 1.0, 2.0)}, "83b116f357d523a3"),
        ({0: struct.pack("<2f", -0.0, -0.0)}, "2cbb9d9fc53b6fe6"),
        ({0: bytes.fromhex("0200c07f")}, "cd3a9e8d49d79968"),
        ({p: words(7, 1, 16, p) for p in range(10)}, "63ff7dc200c4b1bf"),
        ({p: words(31, 257, 64, p) for p in (729, 730, 731, 1048575)}, "badccedf158bf9d1"),
        ({p: words(12345, 6789, 23040, p) for p in (5, 6)}, "85d53a599b2cee5b"),
    ],
)
def test_golden_values_of_the_spec(kv, golden):
    assert fingerprint(kv) == golden
