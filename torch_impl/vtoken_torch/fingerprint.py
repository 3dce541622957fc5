"""The fingerprint of retained KV on the device (SPEC §7): the integers of ``vtoken.fingerprint``, vectorised.

Sums of words times weights run in int32, whose wraparound is arithmetic modulo 2**32; the few values of a token are
finished in int64 under a mask, where a right shift brings in zeros.
"""

from functools import lru_cache
from typing import Final

import torch
from torch import Tensor

from vtoken.fingerprint import SALTS
from vtoken_torch.kv_cache import KVCache

__all__ = ["fingerprint_slots", "fmix32", "kv_fingerprints", "sequence_sums", "token_fingerprints", "weights"]

_MASK: Final = 0xFFFFFFFF
_GOLDEN: Final = 0x9E3779B9
_CHUNK_WORDS: Final = 1 << 17
"""16-bit words gathered at a time: their int32 forms stay in a second-level cache."""


def fmix32(values: Tensor) -> Tensor:
    """murmur3's 32-bit finaliser of int64 values in 0 .. 2**32 - 1, elementwise."""
    values = (values ^ values >> 16) * 0x85EBCA6B & _MASK
    values = (values ^ values >> 13) * 0xC2B2AE35 & _MASK
    return values ^ values >> 16


@lru_cache(maxsize=8)
def weights(num_words: int, device: torch.device) -> Tensor:
    """``W(i, salt)`` of both salts, ``[2, num_words]`` int32 (the same bits as uint32)."""
    steps = torch.arange(num_words, dtype=torch.int64, device=device) * _GOLDEN
    salts = torch.tensor(SALTS, dtype=torch.int64, device=device)
    return (fmix32(steps + salts.unsqueeze(1) & _MASK) | 1).to(torch.int32)


def token_fingerprints(cache: KVCache, slots: Tensor) -> Tensor:
    """Token fingerprints of the KV bits at ``slots`` (``[n]`` int64): ``[2, n]`` int64, one row for each salt."""
    num_planes, words_per_row = cache.bits.shape[0], cache.bits.shape[-1] * cache.spec.item_bytes // 2
    factors = weights(num_planes * words_per_row, cache.device).view(2, num_planes, 1, words_per_row)
    sums = torch.zeros(2, len(slots), dtype=torch.int32, device=cache.device)
    step = max(1, _CHUNK_WORDS // max(1, len(slots) * words_per_row))
    for first in range(0, num_planes, step):
        rows = cache.wide[first : first + step].index_select(1, slots)
        words = rows.view(torch.int16).to(torch.int32).bitwise_and_(0xFFFF)  # zero-extended
        for salt in range(2):
            sums[salt] += (words * factors[salt, first : first + step]).sum((0, 2), dtype=torch.int32)
    return fmix32(sums.to(torch.int64) & _MASK)


def fingerprint_slots(cache: KVCache, slots: Tensor) -> str:
    """16 hex digits over the tokens at ``slots`` (``[n]`` int64, any order) and their positions."""
    low, high = sequence_sums(token_fingerprints(cache, slots), cache.positions[slots]).tolist()
    return f"{high:08x}{low:08x}"


def kv_fingerprints(tokens: Tensor) -> Tensor:
    """Token fingerprints of KV in canonical order, ``[n, ...]`` of elements of 2 or 4 bytes: ``[2, n]`` int64."""
    words = tokens.reshape(len(tokens), -1).view(torch.int16)
    factors = weights(words.shape[1], words.device)
    sums = torch.empty(2, len(words), dtype=torch.int32, device=words.device)
    step = max(1, _CHUNK_WORDS // words.shape[1])
    for first in range(0, len(words), step):
        part = words[first : first + step].to(torch.int32).bitwise_and_(0xFFFF)  # zero-extended
        for salt in range(2):
            sums[salt, first : first + step] = (part * factors[salt]).sum(1, dtype=torch.int32)
    return fmix32(sums.to(torch.int64) & _MASK)


def sequence_sums(fingerprints: Tensor, positions: Tensor) -> Tensor:
    """Both halves of the sequence fingerprint (SPEC H-2), ``[2]`` int64, the first salt's first.

    Args:
        fingerprints: of the tokens, ``[2, n]``.
        positions: theirs, ``[n]``.
    """
    places = fmix32(positions.to(torch.int64) + 1 & _MASK)
    return fmix32(fingerprints ^ places).sum(1) & _MASK
