from hypothesis import given
from hypothesis import strategies as st

from vtoken.types import NULL_BLOCK_ID, PAD_SLOT_ID, Move, cdiv, set_bits


def test_the_null_block_is_zero_and_padding_is_minus_one() -> None:
    assert (NULL_BLOCK_ID, PAD_SLOT_ID) == (0, -1)


def test_a_move_names_a_position_its_source_and_its_destination() -> None:
    assert Move(7, src_slot=40, dst_slot=20) == (7, 40, 20)


def test_cdiv_rounds_up() -> None:
    assert [cdiv(n, 4) for n in (0, 1, 3, 4, 5, 8)] == [0, 1, 1, 1, 2, 2]


@given(st.integers(0, 10**20), st.integers(1, 10**6))
def test_cdiv_is_the_least_number_of_blocks_that_hold_all_tokens(tokens: int, size: int) -> None:
    blocks = cdiv(tokens, size)
    assert blocks * size >= tokens > (blocks - 1) * size


def test_set_bits_counts_from_the_base_upwards() -> None:
    assert list(set_bits(0b1011)) == [0, 1, 3]
    assert list(set_bits(0b1011, base=40)) == [40, 41, 43]
    assert list(set_bits(0)) == []


@given(st.integers(0, 2**128 - 1))
def test_set_bits_are_ascending_and_add_up_to_the_word(word: int) -> None:
    bits = list(set_bits(word))
    assert bits == sorted(bits)
    assert sum(1 << bit for bit in bits) == word
