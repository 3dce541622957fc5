"""The fingerprint a second time, from the words of SPEC H-1 to H-3, in numpy's wrapping uint32."""

from collections.abc import Mapping
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from vtoken.types import Position

__all__ = ["fingerprint"]

Words = npt.NDArray[np.uint32]

_SALTS = (0x00000000, 0x5BD1E995)


def fingerprint(kv: Mapping[Position, bytes]) -> str:
    """16 hex digits over (position, KV bytes), whatever their order (H-2); the second salt's half comes first (H-3)."""
    if not kv:
        return "0" * 16
    places = _fmix32((np.fromiter(kv, dtype=np.uint64) + 1).astype(np.uint32))
    tokens = np.array([_token(data) for data in kv.values()], dtype=np.uint32)
    halves = [int(_fmix32(tokens[:, salt] ^ places).sum(dtype=np.uint32)) for salt in (1, 0)]
    return "".join(f"{half:08x}" for half in halves)


@lru_cache(maxsize=1 << 12)
def _token(data: bytes) -> tuple[int, int]:
    """H-1 under both salts. The cache keeps tokens that live through many steps from being hashed anew."""
    words = np.frombuffer(data, dtype="<u2").astype(np.uint32)
    low, high = (_fmix32((words * _weights(len(words), salt)).sum(dtype=np.uint32, keepdims=True)) for salt in _SALTS)
    return int(low[0]), int(high[0])


@lru_cache
def _weights(num_words: int, salt: int) -> Words:
    index = np.arange(num_words, dtype=np.uint32)
    return _fmix32(index * np.uint32(0x9E3779B9) + np.uint32(salt)) | np.uint32(1)


def _fmix32(value: Words) -> Words:
    value = (value ^ value >> np.uint32(16)) * np.uint32(0x85EBCA6B)
    value = (value ^ value >> np.uint32(13)) * np.uint32(0xC2B2AE35)
    return value ^ value >> np.uint32(16)
