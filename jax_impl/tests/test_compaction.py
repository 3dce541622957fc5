import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vtoken.executor import KVSpec
from vtoken_jax.compaction import move_in_passes, move_pieces, move_tokens
from vtoken_jax.kv_cache import make_cache, read_tokens, storage_dtype, write_tokens

NUM_SLOTS = 32
PADDED = 16


def filled(dtype, seed=0):
    """A pool whose every bit is random, NaN of all payloads (signalling ones too) among the elements."""
    spec = KVSpec(num_layers=2, num_kv_heads=2, num_query_heads=2, head_size=4, dtype=dtype, block_size=4, num_blocks=8)
    rng, unsigned = np.random.default_rng(seed), storage_dtype(spec.item_bytes)
    kv = rng.integers(0, np.iinfo(unsigned).max, (NUM_SLOTS, 4, 8), unsigned, endpoint=True)
    signalling_nan = {"float32": 0x7F800001, "bfloat16": 0x7F81, "float16": 0x7C01}[dtype]
    kv[:, :, 0] = signalling_nan
    slots = np.arange(NUM_SLOTS, dtype=np.int32)
    return write_tokens(make_cache(spec), slots, 100 + slots, kv), kv


def check(dtype, pairs):
    cache, kv = filled(dtype)
    padded = [*pairs, *[(0, NUM_SLOTS)] * (PADDED - len(pairs))]
    src, dst = np.array(padded, np.int32).T

    cache = move_tokens(cache, src, dst)

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
    check(dtype, pairs)


@settings(max_examples=50, deadline=None)
@given(st.permutations(range(NUM_SLOTS)), st.integers(0, PADDED))
def test_disjoint_moves_are_right_for_any_choice_of_slots(slots, count):
    check("bfloat16", list(zip(slots[:count], slots[PADDED : PADDED + count], strict=True)))


def test_moves_in_passes_are_those_of_one_call_whatever_lies_behind_the_last_pass():
    src, dst = np.arange(12, dtype=np.int32), np.arange(31, 19, -1, dtype=np.int32)
    expected = move_tokens(filled("bfloat16")[0], src, dst)
    src, dst = np.append(src, [0, 0, 0]), np.append(dst, [NUM_SLOTS] * 3)
    behind = np.arange(15, dtype=np.int32)
    src, dst = (np.append(slots, behind).reshape(-1, 5).astype(np.int32) for slots in (src, dst))

    moved = move_in_passes(filled("bfloat16")[0], src, dst, 3)

    assert jax.tree.all(jax.tree.map(np.array_equal, moved, expected))


@pytest.mark.parametrize("platform", ["cpu", "gpu"])
@pytest.mark.parametrize(("num_kv_heads", "head_size"), [(2, 8), (3, 64), (64, 512)])
def test_pieces_cover_all_moves_in_few_shapes(platform, num_kv_heads, head_size):
    spec = KVSpec(
        num_layers=4, num_kv_heads=num_kv_heads, num_query_heads=num_kv_heads, head_size=head_size, dtype="float32",
        block_size=4, num_blocks=8,
    )  # fmt: skip
    shapes = set()
    for count in (0, 1, 15, 16, 17, 300, 4096, 4097, 9000):
        pieces = list(move_pieces(count, spec, platform))
        assert [at for piece, _, _ in pieces for at in range(count)[piece]] == list(range(count))
        assert all(piece.stop - piece.start <= passes * size for piece, passes, size in pieces)
        assert platform != "cpu" or len(pieces) == -(-count // 4096)
        shapes |= {(passes, size) for _, passes, size in pieces}
    assert len(shapes) <= (2 if platform == "cpu" else 3)
    assert platform == "cpu" or {passes for passes, _ in shapes} == {1}
