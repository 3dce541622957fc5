import random
import re
import struct
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vtoken.fingerprint import SALTS, fmix32, sequence_fingerprint, token_fingerprint, weights

SPEC = Path(__file__).parent.parent / "SPEC.md"
Tokens = dict[int, list[int]]
"""16-bit words by position."""

# -- a second implementation, word by word from SPEC H-1 to H-3 ------------------------------------------------------


def slow_fmix32(value: int) -> int:
    value = value ^ value // 2**16
    value = value * 0x85EBCA6B % 2**32
    value = value ^ value // 2**13
    value = value * 0xC2B2AE35 % 2**32
    return value ^ value // 2**16


def slow_fingerprint(tokens: Tokens) -> str:
    halves = []
    for salt in (0x5BD1E995, 0x00000000):
        total = 0
        for position, words in tokens.items():
            token = 0
            for i, word in enumerate(words):
                token += word * (slow_fmix32((i * 0x9E3779B9 + salt) % 2**32) | 1)
            total += slow_fmix32(slow_fmix32(token % 2**32) ^ slow_fmix32((position + 1) % 2**32))
        halves.append(f"{total % 2**32:08x}")
    return "".join(halves)


def fingerprint(tokens: Tokens) -> str:
    return sequence_fingerprint(
        (position, struct.pack(f"<{len(words)}H", *words)) for position, words in tokens.items()
    )


# -- golden values: the table at the end of SPEC.md is the one source -------------------------------------------------


def golden_rows() -> dict[str, tuple[Tokens, str]]:
    """Rows ``| name | live positions | words a token | word j at position p | fingerprint |``, by name."""
    section = SPEC.read_text(encoding="utf-8").partition("## Golden values")[2]
    rows = {}
    for line in section.splitlines():
        if line.startswith("| ") and "`" in line:
            name, live, count, rule, digits = (cell.strip().strip("`") for cell in line.strip("|").split("|"))
            rows[name] = ({p: words_of(rule, p, int(count)) for p in positions_of(live)}, digits)
    return rows


def positions_of(text: str) -> list[int]:
    first, _, last = text.partition(" to ")
    if last:
        return list(range(int(first), int(last) + 1))
    return [] if text == "none" else [int(number) for number in text.split()]


def words_of(rule: str, position: int, count: int) -> list[int]:
    formula = re.fullmatch(r"\(p \* (\d+) \+ j \* (\d+)\) mod 65536", rule)
    if formula:
        return [(position * int(formula[1]) + j * int(formula[2])) % 65536 for j in range(count)]
    words = [int(word, 16) for word in rule.split()]
    assert len(words) == count
    return words


GOLDEN = golden_rows()


def test_the_spec_has_golden_values() -> None:
    assert len(GOLDEN) == 14
    assert len({digits for _, digits in GOLDEN.values()}) == 14


@pytest.mark.parametrize(("tokens", "digits"), GOLDEN.values(), ids=GOLDEN)
def test_golden_values_hold(tokens: Tokens, digits: str) -> None:
    assert fingerprint(tokens) == digits
    assert slow_fingerprint(tokens) == digits


# -- what it sees ----------------------------------------------------------------------------------------------------

words = st.lists(st.integers(0, 65535), min_size=1, max_size=20)


def test_fmix32_is_murmur3s_finaliser() -> None:
    assert [fmix32(value) for value in (0, 1, 0xFFFFFFFF)] == [0, 0x514E28B7, 0x81F16F39]


def test_weights_are_odd_and_differ_by_salt() -> None:
    first, second = (weights(64, salt) for salt in SALTS)
    assert all(weight % 2 for weight in (*first, *second))
    assert len({*first, *second}) == 128


@given(st.dictionaries(st.integers(0, 2**31 - 2), words, max_size=6))
def test_it_agrees_with_the_slow_implementation(tokens: Tokens) -> None:
    assert fingerprint(tokens) == slow_fingerprint(tokens)


@given(st.dictionaries(st.integers(0, 1000), words, max_size=8), st.randoms())
def test_memory_order_does_not_matter(tokens: Tokens, order: random.Random) -> None:
    shuffled = list(tokens.items())
    order.shuffle(shuffled)
    assert fingerprint(dict(shuffled)) == fingerprint(tokens)


@given(words, words, st.integers(0, 1000), st.integers(0, 1000))
def test_positions_matter(first: list[int], second: list[int], p: int, q: int) -> None:
    if p != q and first != second:
        assert fingerprint({p: first, q: second}) != fingerprint({p: second, q: first})
    if p != q:
        assert fingerprint({p: first}) != fingerprint({q: first})


@given(words, st.data())
def test_a_flipped_bit_is_seen(token: list[int], data: st.DataObject) -> None:
    index, bit = data.draw(st.integers(0, len(token) - 1)), data.draw(st.integers(0, 15))
    flipped = [*token]
    flipped[index] ^= 1 << bit
    assert fingerprint({0: flipped}) != fingerprint({0: token})


def test_a_pair_of_flipped_signs_is_seen() -> None:
    """With 32-bit words it would not be: 2**31 times any odd weight is 2**31."""
    token = list(range(64))  # 32 float32 elements; the sign is the highest bit of the upper word
    seen = {fingerprint({0: token})}
    for first in range(1, 64, 2):
        for second in range(first + 2, 64, 2):
            flipped = [*token]
            flipped[first] ^= 0x8000
            flipped[second] ^= 0x8000
            seen.add(fingerprint({0: flipped}))
    assert len(seen) == 1 + 32 * 31 // 2


def test_an_exchange_of_key_and_value_is_seen() -> None:
    token = list(range(16))
    assert fingerprint({0: token}) != fingerprint({0: [*token[8:], *token[:8]]})


def test_a_dead_token_leaves_no_trace() -> None:
    tokens = {p: [p, p + 1] for p in range(9)}
    del tokens[4]
    assert fingerprint(tokens) == fingerprint({p: [p, p + 1] for p in (8, 0, 1, 2, 3, 5, 6, 7)})


def test_nothing_live_is_zero_and_a_live_token_of_zeros_is_not() -> None:
    assert fingerprint({}) == "0" * 16
    assert fingerprint({0: [0, 0]}) != "0" * 16


def test_words_are_read_low_half_first() -> None:
    assert token_fingerprint(b"\x01\x02\x03\x04") == token_fingerprint(struct.pack("<2H", 0x0201, 0x0403))


def test_a_token_of_an_odd_number_of_bytes_is_refused() -> None:
    with pytest.raises(ValueError, match="bytes length not a multiple of item size"):
        token_fingerprint(b"\x01\x02\x03")
