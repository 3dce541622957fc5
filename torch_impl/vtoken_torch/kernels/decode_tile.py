"""How decode attention is cut into programs: what a kernel is compiled for, by the launch and by the AOT gate alike."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from triton import next_power_of_2

from vtoken.types import cdiv

__all__ = [
    "MASS_TILE",
    "MIN_TILE",
    "WORD_BITS",
    "Tile",
    "choose_tile",
    "mass_constants",
    "reduce_constants",
    "split_constants",
]

MIN_TILE: Final = 16
"""Rows and columns of the smallest matrix product, and query heads of a program: more of a group are other programs."""

MASS_TILE: Final = 64
"""Tokens that one program of the mass kernel sums at once."""

WORD_BITS: Final = 32
"""Slots of one live word."""

_TILE_BYTES: Final = 16384  # of keys, and of values
_MAX_TOKENS: Final = 64


@dataclass(frozen=True, slots=True)
class Tile:
    """What one program reads at once, and how it is compiled.

    Attributes:
        num_tokens: a power of two, at least 16.
        num_warps, num_stages: of Triton.
    """

    num_tokens: int
    num_warps: int = 4
    num_stages: int = 3


def choose_tile(head_size: int, item_bytes: int) -> Tile:
    """The largest tile that compiles without spilled registers and lets about four programs share a multiprocessor.

    Args:
        head_size: elements.
        item_bytes: of one element of keys and values.
    """
    num_tokens = _TILE_BYTES // (_head_tile(head_size) * item_bytes)
    return Tile(min(max(num_tokens, MIN_TILE), _MAX_TOKENS))


def split_constants(
    num_query_heads: int, num_kv_heads: int, head_size: int, block_size: int, tile: Tile, write_logits: bool
) -> Mapping[str, Any]:
    """Constants of ``split_kernel``; bfloat16 products in float32 (``upcast``) are for Triton's interpreter alone."""
    return {
        "num_kv_heads": num_kv_heads,
        "group_size": num_query_heads // num_kv_heads,
        "group_tile": MIN_TILE,
        "head_size": head_size,
        "head_tile": _head_tile(head_size),
        "block_size": block_size,
        "words_per_block": cdiv(block_size, WORD_BITS),
        "token_tile": tile.num_tokens,
        "write_logits": write_logits,
    }


def reduce_constants(num_query_heads: int, head_size: int, num_splits: int) -> Mapping[str, Any]:
    """Constants of ``reduce_kernel``."""
    return {
        "num_query_heads": num_query_heads,
        "head_size": head_size,
        "head_tile": _head_tile(head_size),
        "split_tile": next_power_of_2(num_splits),
    }


def mass_constants(num_query_heads: int, block_size: int) -> Mapping[str, Any]:
    """Constants of ``mass_kernel``."""
    return {
        "num_query_heads": num_query_heads,
        "head_tile": next_power_of_2(num_query_heads),
        "block_size": block_size,
        "token_tile": MASS_TILE,
    }


def _head_tile(head_size: int) -> int:
    padded: int = next_power_of_2(head_size)
    return max(padded, MIN_TILE)
