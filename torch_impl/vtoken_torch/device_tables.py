"""Block tables, live words and free flags on the device, in the form that a decode kernel reads.

Live words are indexed by request and table order, never by block id: a shared block may be alive for one holder and
dead for another.
"""

from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

from vtoken.executor import KVSpec
from vtoken.types import NULL_BLOCK_ID, BlockId, cdiv

__all__ = ["DeviceTables"]

_WORD_BITS: Final = 32
_WORD_MASK: Final = 0xFFFFFFFF


class DeviceTables:
    """Tables of one pool; ``max_blocks`` is the whole pool, so that one request may hold it all.

    Attributes:
        block_table: ``[max_num_reqs, max_blocks]`` int32, padded with the null block.
        num_blocks: ``[max_num_reqs]`` int32.
        live_words: ``[max_num_reqs, max_blocks, words_per_block]`` int32; bit o % 32 of word o // 32 is slot o.
        free: ``[num_blocks]`` bool.
    """

    def __init__(self, spec: KVSpec, device: torch.device) -> None:
        self.device = device
        self._block_size = spec.block_size
        self._words_per_block = cdiv(spec.block_size, _WORD_BITS)
        rows, max_blocks = spec.max_num_reqs, spec.num_blocks - 1
        self.block_table = torch.full((rows, max_blocks), NULL_BLOCK_ID, dtype=torch.int32, device=device)
        self.num_blocks = torch.zeros(rows, dtype=torch.int32, device=device)
        self.live_words = torch.zeros(rows, max_blocks, self._words_per_block, dtype=torch.int32, device=device)
        self.free = torch.zeros(spec.num_blocks, dtype=torch.bool, device=device)

    # -- writing -----------------------------------------------------------------------------------------------------

    def set_row(self, row: int, block_ids: Sequence[BlockId], live_words: Sequence[int]) -> None:
        """Rewrites a row whole, padding included: nothing of an earlier request stays."""
        self.block_table[row] = NULL_BLOCK_ID
        self.live_words[row] = 0
        self.num_blocks[row] = len(block_ids)
        if block_ids:
            self.block_table[row, : len(block_ids)] = torch.tensor(block_ids, dtype=torch.int32, device=self.device)
            self.live_words[row, : len(block_ids)] = self._pack(live_words)

    def set_words(self, row: int, indices: Sequence[int], live_words: Sequence[int]) -> None:
        """Updates the live words of the blocks at these table indices."""
        if indices:
            self.live_words[row, torch.tensor(indices, device=self.device)] = self._pack(live_words)

    def set_free(self, block_ids: Sequence[BlockId], free: bool) -> None:
        """Flags blocks as free or not."""
        if block_ids:
            self.free[torch.tensor(block_ids, device=self.device)] = free

    # -- reading -----------------------------------------------------------------------------------------------------

    def live_slots(self, row: int) -> Tensor:
        """Slots of a row's live tokens in physical order, ``[num_live_tokens]`` int64."""
        count = int(self.num_blocks[row])
        blocks = self.block_table[row, :count].to(torch.int64)
        bit = torch.arange(_WORD_BITS, dtype=torch.int32, device=self.device)
        live = (self.live_words[row, :count].unsqueeze(-1) >> bit) & 1  # [count, words_per_block, 32]
        offsets = torch.arange(self._block_size, device=self.device)
        slots = blocks.unsqueeze(1) * self._block_size + offsets  # [count, block_size]
        return slots[live.flatten(1)[:, : self._block_size].bool()]

    def read_row(self, row: int) -> tuple[tuple[BlockId, ...], tuple[int, ...]]:
        """Block ids of a row and one live word for each, as plain integers."""
        count = int(self.num_blocks[row])
        words = tuple(self._unpack(parts) for parts in self.live_words[row, :count].tolist())
        return tuple(self.block_table[row, :count].tolist()), words

    def read_free(self) -> frozenset[BlockId]:
        """Blocks flagged free."""
        return frozenset(self.free.nonzero().flatten().tolist())

    # -- words -------------------------------------------------------------------------------------------------------

    def _pack(self, live_words: Sequence[int]) -> Tensor:
        shifts = range(0, self._words_per_block * _WORD_BITS, _WORD_BITS)
        parts = [[word >> shift & _WORD_MASK for shift in shifts] for word in live_words]
        return torch.tensor(parts, dtype=torch.int64, device=self.device).to(torch.int32)  # keeps the low 32 bits

    @staticmethod
    def _unpack(parts: Sequence[int]) -> int:
        return sum((part & _WORD_MASK) << index * _WORD_BITS for index, part in enumerate(parts))
