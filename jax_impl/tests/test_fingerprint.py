import numpy as np
import pytest

from vtoken.fingerprint import SALTS, sequence_fingerprint, weights
from vtoken_jax.fingerprint import make_weights
from vtoken_jax.kv_store import JaxKVStore

DTYPES = ["float32", "bfloat16", "float16"]


def store_with(spec, kv, slots, positions):
    """Row 0 holds the tokens in ``slots`` (blocks from slot 0's up), nothing else is live."""
    store = JaxKVStore(spec)
    store.write(slots, positions, kv)
    words = [0] * spec.num_blocks
    for slot in slots:
        words[slot // spec.block_size] |= 1 << slot % spec.block_size
    store.set_row(0, range(1, spec.num_blocks), words[1:])
    return store


def split(spec, kv):
    return [kv[at : at + spec.token_bytes] for at in range(0, len(kv), spec.token_bytes)]


@pytest.mark.parametrize("item_bytes", [2, 4])
def test_the_weights_are_those_of_the_spec(item_bytes):
    words = item_bytes // 2
    ours = np.asarray(make_weights(num_planes=4, width=6, item_bytes=item_bytes))  # [plane, word, salt, element]

    for index, salt in enumerate(SALTS):
        expected = weights(4 * 6 * words, salt)
        assert ours[:, :, index].transpose(0, 2, 1).ravel().tolist() == list(expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_tokens", [0, 1, 16, 17, 92])
def test_it_equals_the_plain_integers_for_any_bits(make_spec, any_bits, rng, dtype, num_tokens):
    spec = make_spec(dtype=dtype)
    kv, slots = any_bits(spec, num_tokens), rng.permutation(np.arange(4, 96))[:num_tokens].tolist()
    positions = rng.permutation(1000)[:num_tokens].tolist()

    store = store_with(spec, kv, slots, positions)

    expected = sequence_fingerprint(zip(positions, split(spec, kv), strict=True))
    assert store.fingerprint_row(0) == store.read_row(0).fingerprint == expected


def test_a_row_longer_than_the_largest_piece_is_hashed_whole(make_spec, any_bits):
    spec = make_spec(block_size=64, num_blocks=20)
    slots = range(64, 64 + 1100)
    kv = any_bits(spec, len(slots))

    store = store_with(spec, kv, slots, range(len(slots)))

    assert store.fingerprint_row(0) == sequence_fingerprint(enumerate(split(spec, kv)))


def test_slots_do_not_matter_but_bits_and_positions_do(make_spec, any_bits):
    spec = make_spec()
    kv = any_bits(spec, 3)
    first = store_with(spec, kv, [4, 5, 6], [0, 1, 2]).fingerprint_row(0)

    flipped = bytes([kv[0] ^ 1]) + kv[1:]
    assert store_with(spec, kv, [70, 9, 33], [0, 1, 2]).fingerprint_row(0) == first
    assert store_with(spec, kv, [4, 5, 6], [0, 1, 3]).fingerprint_row(0) != first
    assert store_with(spec, flipped, [4, 5, 6], [0, 1, 2]).fingerprint_row(0) != first


def test_it_reads_the_bits_that_lie_in_the_pool_now(make_spec, any_bits):
    spec = make_spec()
    store = store_with(spec, any_bits(spec, 3), [4, 5, 6], [0, 1, 2])
    before = store.fingerprint_row(0)

    new = any_bits(spec, 1)
    store.write([5], [1], new)

    tokens = dict(zip((0, 1, 2), store.read_row(0).kv, strict=True))
    assert tokens[1] == new
    assert before != store.fingerprint_row(0) == sequence_fingerprint(tokens.items())
