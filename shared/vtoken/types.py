"""Names that all packages share: identifiers, slot arithmetic, and the record of one move.

Identifiers are plain ``int`` and ``str`` under telling names: the spec runs on the scheduler's hot path, where a
wrapper type would cost more than the lookup it labels.
"""

from collections.abc import Iterator
from typing import NamedTuple, TypeAlias

__all__ = ["NULL_BLOCK_ID", "PAD_SLOT_ID", "BlockId", "Move", "Position", "ReqId", "SlotId", "cdiv", "set_bits"]

ReqId: TypeAlias = str
"""One request."""

Position: TypeAlias = int
"""Place of a token in its sequence, fixed for life (the *logical token id* of paper §3.2)."""

BlockId: TypeAlias = int
SlotId: TypeAlias = int
"""``block_id * block_size + block_offset``."""

NULL_BLOCK_ID: BlockId = 0
"""Never allocated, moved or freed; pads block tables, as in vLLM."""

PAD_SLOT_ID: SlotId = -1
"""Padding in a slot mapping; the only meaning of -1."""


class Move(NamedTuple):
    """One token's KV in all layers, copied from ``src_slot`` to ``dst_slot`` (paper §3.3)."""

    position: Position
    src_slot: SlotId
    dst_slot: SlotId


def cdiv(numerator: int, denominator: int) -> int:
    """Integer division rounded up."""
    return -(-numerator // denominator)


def set_bits(word: int, base: int = 0) -> Iterator[int]:
    """``base`` plus the number of each set bit, ascending."""
    while word:
        low = word & -word
        yield base + low.bit_length() - 1
        word ^= low
