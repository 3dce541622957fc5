import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import vtoken.fingerprint as spec_fingerprint
from vtoken_torch import fingerprint
from vtoken_torch.copy_engine import make_copy_engine
from vtoken_torch.kv_cache import KVCache


def filled(spec, device, slots, positions, seed=0):
    """A cache with random bits at ``slots``, and the same tokens as (position, bytes)."""
    cache = KVCache(spec, device)
    rng = random.Random(seed)
    tokens = [rng.randbytes(spec.token_bytes) for _ in slots]
    make_copy_engine(cache).write(slots, b"".join(tokens))
    cache.positions[torch.tensor(slots, device=device)] = torch.tensor(positions, dtype=torch.int32, device=device)
    return cache, list(zip(positions, tokens, strict=True))


def of_slots(cache, slots):
    return fingerprint.fingerprint_slots(cache, torch.tensor(slots, dtype=torch.int64, device=cache.device))


@given(st.lists(st.integers(0, 2**32 - 1), min_size=1))
def test_fmix32_is_the_spec_s(values):
    assert fingerprint.fmix32(torch.tensor(values)).tolist() == [spec_fingerprint.fmix32(value) for value in values]


@pytest.mark.parametrize("num_words", [1, 64, 5000])
def test_weights_are_the_spec_s(device, num_words):
    expected = [list(spec_fingerprint.weights(num_words, salt)) for salt in spec_fingerprint.SALTS]
    assert (fingerprint.weights(num_words, device).to(torch.int64) & 0xFFFFFFFF).tolist() == expected


@pytest.mark.parametrize("block_size", [1, 16, 33, 64, 128])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_random_bits_have_the_spec_s_fingerprint(make_spec, device, dtype, block_size):
    spec = make_spec(dtype=dtype, block_size=block_size, num_blocks=3 + 64 // block_size)
    slots = random.Random(block_size).sample(range(block_size, spec.num_slots), 40)
    positions = random.Random(1).sample(range(5000), 40)
    cache, tokens = filled(spec, device, slots, positions)
    assert of_slots(cache, slots) == spec_fingerprint.sequence_fingerprint(tokens)


@pytest.mark.parametrize(("num_kv_heads", "head_size"), [(1, 1), (1, 3), (3, 5)])
def test_rows_of_odd_length_have_the_spec_s_fingerprint(make_spec, device, num_kv_heads, head_size):
    spec = make_spec(
        dtype="float16", num_kv_heads=num_kv_heads, num_query_heads=num_kv_heads, head_size=head_size, num_layers=3
    )
    cache, tokens = filled(spec, device, [4, 9, 30], [0, 1, 2])
    assert of_slots(cache, [4, 9, 30]) == spec_fingerprint.sequence_fingerprint(tokens)


@pytest.mark.parametrize("num_tokens", [1, 100, 700])
def test_gathering_in_chunks_changes_nothing(make_spec, device, num_tokens):
    spec = make_spec(num_layers=7, num_kv_heads=3, num_query_heads=3, head_size=64, block_size=16, num_blocks=50)
    words_per_row = 3 * 64 * 2
    assert 1 * 14 * words_per_row < fingerprint._CHUNK_WORDS < 700 * words_per_row  # one chunk, and one for each plane
    slots = random.Random(0).sample(range(16, spec.num_slots), num_tokens)
    cache, tokens = filled(spec, device, slots, range(num_tokens))
    assert of_slots(cache, slots) == spec_fingerprint.sequence_fingerprint(tokens)


def test_memory_order_does_not_matter_and_positions_do(make_spec, device):
    spec = make_spec()
    cache, _ = filled(spec, device, [4, 9, 30], [0, 1, 2])
    before = of_slots(cache, [4, 9, 30])
    assert of_slots(cache, [30, 4, 9]) == before
    cache.positions[torch.tensor([4, 9], device=device)] = cache.positions[torch.tensor([9, 4], device=device)]
    assert of_slots(cache, [4, 9, 30]) != before


def test_one_flipped_bit_or_a_pair_of_flipped_signs_is_seen(make_spec, device):
    spec = make_spec()
    cache, _ = filled(spec, device, [4, 9, 30], [0, 1, 2])
    before = of_slots(cache, [4, 9, 30])
    cache.bits[3, 9, 15] ^= 1
    assert of_slots(cache, [4, 9, 30]) != before
    cache.bits[3, 9, 15] ^= 1
    assert of_slots(cache, [4, 9, 30]) == before
    cache.bits[0, 9, :2] ^= -(2**31)
    assert of_slots(cache, [4, 9, 30]) != before


def test_no_token_at_all_is_all_zeros(make_spec, device):
    assert of_slots(KVCache(make_spec(), device), []) == spec_fingerprint.sequence_fingerprint([]) == "0" * 16
