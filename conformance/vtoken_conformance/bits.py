"""KV bytes made from names alone, and what their bits mean as numbers.

A token's bytes are ``shake_128("seed/request/incarnation/position")``, so that every executor, in any language, gets
the same. ``finite`` tokens hold values between 2**-4 and 1 of either sign; ``special`` ones are finite except that
every position of the form 4k + 3 holds NaNs with payloads, infinities, -0, denormals and the largest numbers;
``random`` ones hold whatever the hash says.
"""

from functools import lru_cache
from hashlib import shake_128
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt

from vtoken.executor import DType, KVSpec
from vtoken.types import Position

__all__ = ["BIT_MODES", "Bits", "decode", "is_moderate", "is_special", "make_queries", "make_token"]

Bits = Literal["finite", "special", "random"]
BIT_MODES: tuple[str, ...] = get_args(Bits)

_WORD: dict[str, Any] = {"float32": np.dtype("<u4"), "bfloat16": np.dtype("<u2"), "float16": np.dtype("<u2")}
_MANTISSA_BITS = {"float32": 23, "bfloat16": 7, "float16": 10}
_EXPONENT_BITS = {"float32": 8, "bfloat16": 8, "float16": 5}
_MODERATE_EXPONENT = 10  # numbers below 2**11: no sum of products overflows, in any of the formats

_SPECIAL: dict[str, tuple[int, ...]] = {
    # quiet NaN with payload, signalling NaN, negative NaN, +inf, -inf, -0, least denormal, largest number
    "float32": (
        0x7FC12345,
        0x7F800001,
        0xFFFFFFFF,
        0x7F800000,
        0xFF800000,
        0x80000000,
        0x00000001,
        0x7F7FFFFF,
    ),
    "bfloat16": (0x7FD5, 0x7F81, 0xFFFF, 0x7F80, 0xFF80, 0x8000, 0x0001, 0x7F7F),
    "float16": (0x7E55, 0x7C01, 0xFFFF, 0x7C00, 0xFC00, 0x8000, 0x0001, 0x7BFF),
}


def is_special(position: Position) -> bool:
    """Whether ``special`` bits make this position hold what is no ordinary number."""
    return position % 4 == 3


@lru_cache(maxsize=1 << 15)
def make_token(spec: KVSpec, bits: Bits, key: str, position: Position) -> bytes:
    """One token's KV bytes; ``key`` names the seed, the request and its incarnation."""
    raw = shake_128(f"{key}/{position}".encode()).digest(spec.token_bytes)
    words = np.frombuffer(raw, dtype=_WORD[spec.dtype])
    if bits == "random":
        return raw
    if bits == "special" and is_special(position):
        patterns = np.array(_SPECIAL[spec.dtype], dtype=words.dtype)
        return bytes(patterns[words % len(patterns)])
    return _into_range(words, spec.dtype).tobytes()


def _into_range(words: npt.NDArray[Any], dtype: DType) -> npt.NDArray[Any]:
    """The same sign and mantissa bits, with one of four exponents: values between 2**-4 and 1."""
    shift, width = _MANTISSA_BITS[dtype], _EXPONENT_BITS[dtype]
    mask = ((1 << width) - 1) << shift
    lowest = (1 << (width - 1)) - 1 - 4
    exponents = (words >> words.dtype.type(shift) & words.dtype.type(3)) + words.dtype.type(lowest)
    cleared = words & words.dtype.type(~mask & ((1 << words.dtype.itemsize * 8) - 1))
    in_range: npt.NDArray[Any] = cleared | exponents << words.dtype.type(shift)
    return in_range


@lru_cache(maxsize=1 << 12)
def is_moderate(kv: bytes, dtype: DType) -> bool:
    """Whether all elements are finite and below 2**11, so that exact arithmetic has an answer to compare with."""
    words = np.frombuffer(kv, dtype=_WORD[dtype]).astype(np.uint32)
    width = _EXPONENT_BITS[dtype]
    exponents = words >> np.uint32(_MANTISSA_BITS[dtype]) & np.uint32((1 << width) - 1)
    return bool((exponents <= (1 << (width - 1)) - 1 + _MODERATE_EXPONENT).all())


def decode(kv: bytes, dtype: DType) -> npt.NDArray[np.float64]:
    """The numbers that raw bits stand for: flat float64, in their order."""
    words = np.frombuffer(kv, dtype=_WORD[dtype])
    if dtype == "bfloat16":  # the upper half of a float32
        words = words.astype(np.uint32) << np.uint32(16)
    return words.view(np.float16 if dtype == "float16" else np.float32).astype(np.float64)


def make_queries(spec: KVSpec, key: str, num_queries: int) -> bytes:
    """Fixed pseudo-random queries: float32 ``[num_queries, num_layers, num_query_heads, head_size]``, in [-2, 2)."""
    raw = shake_128(f"query/{key}".encode()).digest(num_queries * spec.query_elements * 2)
    values = np.frombuffer(raw, dtype="<i2").astype(np.float32) / np.float32(1 << 14)
    return values.tobytes()
