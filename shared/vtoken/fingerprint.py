"""The fingerprint of retained KV in plain integers (SPEC §7): what every executor must compute, bit for bit.

A token's raw bytes are split into 16-bit words, low half first. Word i times an odd weight W(i, salt) is summed and
finalised with murmur3's fmix32, all modulo 2**32. The sequence is the sum over live tokens of
``fmix32(token ^ fmix32(position + 1))``: memory order does not matter, positions do. Two salts make 64 bits.

16-bit words, not 32: 2**31 times any odd weight is 2**31, so that 32-bit words would miss pairs of flipped signs.
"""

import sys
from array import array
from collections.abc import Iterable
from functools import cache, lru_cache
from operator import mul

from vtoken.types import Position

__all__ = ["SALTS", "fmix32", "sequence_fingerprint", "token_fingerprint", "weights"]

SALTS = (0x00000000, 0x5BD1E995)
_MASK = 0xFFFFFFFF
_GOLDEN = 0x9E3779B9


def fmix32(value: int) -> int:
    """murmur3's 32-bit finaliser (Austin Appleby, public domain)."""
    value ^= value >> 16
    value = (value * 0x85EBCA6B) & _MASK
    value ^= value >> 13
    value = (value * 0xC2B2AE35) & _MASK
    return value ^ (value >> 16)


@cache
def weights(num_words: int, salt: int) -> tuple[int, ...]:
    """``W(i, salt) = fmix32(i * 0x9E3779B9 + salt) | 1`` for each word of a token."""
    return tuple(fmix32((i * _GOLDEN + salt) & _MASK) | 1 for i in range(num_words))


@lru_cache(maxsize=1 << 12)
def token_fingerprint(kv: bytes) -> tuple[int, int]:
    """One token's KV: raw bytes in canonical order (layer, K then V, head, dim), an even number of them."""
    words = array("H", kv)
    if sys.byteorder == "big":
        words.byteswap()
    low, high = (fmix32(sum(map(mul, words, weights(len(words), salt))) & _MASK) for salt in SALTS)
    return low, high


def sequence_fingerprint(tokens: Iterable[tuple[Position, bytes]]) -> str:
    """16 hex digits over the live tokens of one request, given as (position, KV bytes) in any order."""
    sums = [0, 0]
    for position, kv in tokens:
        place = fmix32((position + 1) & _MASK)
        for half, token in enumerate(token_fingerprint(kv)):
            sums[half] += fmix32(token ^ place)
    return "".join(f"{total & _MASK:08x}" for total in reversed(sums))
