import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vtoken_jax.buckets import INDEX_SIZES, bucket, chunks, pad, token_sizes, width_bucket

counts = st.integers(0, 5000)
sizes = st.one_of(st.just(INDEX_SIZES), st.integers(1, 1 << 22).map(token_sizes))


@given(counts, sizes)
def test_chunks_cover_every_index_once_and_in_order(count, sizes):
    pieces = [piece for piece, _ in chunks(count, sizes)]

    assert [index for piece in pieces for index in range(piece.start, piece.stop)] == list(range(count))


@given(counts, sizes)
def test_a_piece_fits_its_size_and_is_padded_at_most_fourfold_except_in_the_smallest(count, sizes):
    for piece, size in chunks(count, sizes):
        length = piece.stop - piece.start
        assert size in sizes
        assert 0 < length <= size
        assert size == min(sizes) or size < 4 * length


@given(st.integers(1, 1 << 26))
def test_sizes_are_few_and_bound_the_bytes_of_a_piece(token_bytes):
    sizes = token_sizes(token_bytes)

    assert 1 <= len(sizes) <= 4
    assert list(sizes) == sorted(set(sizes), reverse=True)
    assert max(sizes) * token_bytes <= 1 << 24 or sizes == (1,)


@pytest.mark.parametrize(("token_bytes", "expected"), [(256, (1024, 64)), (46080, (256, 16, 1)), (1 << 25, (1,))])
def test_sizes_of_a_toy_of_smollm2_and_of_a_giant(token_bytes, expected):
    assert token_sizes(token_bytes) == expected


@given(st.integers(0, 1 << 20), st.sampled_from([2, 4]))
def test_a_width_holds_its_slots_and_adds_at_most_one_part_in_as_many_as_an_octave_has(num_slots, an_octave):
    width = width_bucket(num_slots, an_octave)

    assert num_slots <= width <= max(256, num_slots * (1 + 1 / an_octave))
    assert width_bucket(width, an_octave) == width
    assert width <= bucket(num_slots, 256)


def test_widths_are_few():
    decode, chunk = (sorted({width_bucket(slots, an_octave) for slots in range(8193)}) for an_octave in (4, 2))

    assert decode[:10] == [256, 320, 384, 448, 512, 640, 768, 896, 1024, 1280]
    assert (len(decode), len(chunk)) == (21, 11)
    assert set(chunk) < set(decode)


def test_padding_goes_behind_the_rows():
    rows = np.arange(6, dtype=np.int32).reshape(3, 2)

    assert pad(rows, 4, -9).tolist() == [[0, 1], [2, 3], [4, 5], [-9, -9]]
    assert pad(rows, 3, -9) is rows
