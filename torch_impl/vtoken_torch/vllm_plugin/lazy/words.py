"""Live words as the workers are told them, and as arrays."""

from collections.abc import Collection

import numpy as np

from vtoken.request_table import RequestTable
from vtoken_torch.vllm_plugin.record import LiveWords

__all__ = ["changed_words", "live_slots", "whole_words"]


def changed_words(table: RequestTable, blocks: Collection[int]) -> LiveWords:
    """The words from the first to the last of these blocks (indices into the block list)."""
    first, end = min(blocks), max(blocks) + 1
    return LiveWords(first, tuple(_word(table, index) for index in range(first, end)))


def whole_words(table: RequestTable) -> LiveWords:
    """All words up to the last block that has a hole."""
    words = [_word(table, index) for index in range(len(table.live_words))]
    full = (1 << table.block_size) - 1
    while words and words[-1] == full:
        words.pop()
    return LiveWords(0, tuple(words))


def live_slots(table: RequestTable) -> "np.ndarray":
    """Table slots of the live tokens, ascending: int64 ``[num_live_tokens]``. O(length), in numpy."""
    num_bytes = -(-table.block_size // 8)
    packed = b"".join(word.to_bytes(num_bytes, "little") for word in table.live_words)
    bits = np.unpackbits(np.frombuffer(packed, dtype=np.uint8), bitorder="little")
    return np.flatnonzero(bits.reshape(-1, num_bytes * 8)[:, : table.block_size])


def _word(table: RequestTable, index: int) -> int:
    """Slots from the cursor on count as live: tokens that are appended there later need not be told."""
    size = table.block_size
    word = table.live_words[index]
    num_written = min(max(table.cursor - index * size, 0), size)
    return word if num_written == size else word | (1 << size) - (1 << num_written)
