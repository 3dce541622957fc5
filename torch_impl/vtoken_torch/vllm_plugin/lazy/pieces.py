"""Reads K and V of requests with dead slots out of vLLM's CPU cache, for plain torch. Indices serve all layers.

A request's blocks are taken a few at a time, a *piece*, so that requests of any lengths make one batch: padding fills
no more than a piece. Blocks without a live token are left out.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import numpy as np
import torch

__all__ = ["Packing", "Pieces", "Scratch", "Visible"]


class Packing:
    """How K and V lie within one (block, head): plainly, K by columns and V by rows, or in some other order."""

    def __init__(self, offsets: torch.Tensor) -> None:
        """``offsets``: of ``probe_packing``."""
        self.block_size, width = offsets.shape
        self.head_size = width // 2
        columns, rows = offsets[:, : self.head_size].T.flatten(), offsets[:, self.head_size :].flatten()
        order = torch.cat([columns, rows])
        self.is_plain = torch.equal(order, torch.arange(len(order)))
        self._order = order

    def unpacked(self, cache: torch.Tensor, block_ids: torch.Tensor) -> torch.Tensor:
        """A plain cache of these blocks alone: ``[len(block_ids), num_kv_heads, block_size, 2 * head_size]``."""
        blocks = cache.flatten(2).index_select(0, block_ids)
        return blocks[..., self._order].view(-1, *cache.shape[1:])


class Scratch:
    """Memory that is used over and over: to get fresh pages for each layer takes longer than to copy a cache into them.

    What is read stays until the next reading in that dtype.
    """

    def __init__(self) -> None:
        self._flat: dict[torch.dtype, torch.Tensor] = {}

    def read(self, source: torch.Tensor, index: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
        """Rows of ``source`` ``[num_rows, row_size]`` as float32 of this shape."""
        found = self._take(source.dtype, prod(shape))
        torch.index_select(source, 0, index, out=found.view(len(index), -1))
        if source.dtype is not torch.float32:
            found = self._take(torch.float32, prod(shape)).copy_(found)
        return found.view(shape)

    def _take(self, dtype: torch.dtype, size: int) -> torch.Tensor:
        if dtype not in self._flat or len(self._flat[dtype]) < size:
            self._flat[dtype] = torch.empty(size, dtype=dtype)
        return self._flat[dtype][:size]


@dataclass(frozen=True, slots=True)
class Visible:
    """One request's cached tokens in a step.

    Attributes:
        block_ids: int32 ``[num_blocks]``, up to its length.
        length: slots up to the cursor, with the step's own tokens; the last one is live.
        dead: int64, indices of dead slots in table order, below the length.
    """

    block_ids: np.ndarray
    length: int
    dead: np.ndarray


class Pieces:
    """K and V of some requests as batches of pieces.

    Attributes:
        owner: int64 ``[num_pieces]``, which of the requests a piece belongs to; each has one at least.
        slots: int64 ``[num_pieces, piece_slots]``, which of its request's slots stands where; padding has any.
        hidden: bool ``[num_pieces, piece_slots]``: dead, padding, or behind the length. No piece is hidden as a whole.
    """

    def __init__(
        self, requests: Sequence[Visible], packing: Packing, num_kv_heads: int, piece_blocks: int, scratch: Scratch
    ) -> None:
        self._packing, self._scratch = packing, scratch
        self._num_heads, size = num_kv_heads, packing.block_size
        lengths = np.array([request.length for request in requests])
        counts = -(-lengths // size)
        ends = counts.cumsum()
        is_hidden = np.zeros((ends[-1], size), dtype=np.bool_)
        starts = ((ends - counts) * size).tolist()
        dead = [request.dead + start for request, start in zip(requests, starts, strict=True)]
        is_hidden.ravel()[np.concatenate(dead)] = True
        is_hidden[ends - 1] |= np.arange(size) > ((lengths - 1) % size)[:, None]
        kept = np.flatnonzero(~is_hidden.all(1))  # the last one of a request has its live token
        owner = np.arange(len(requests)).repeat(counts)[kept]
        num_kept = np.bincount(owner)
        num_pieces = -(-num_kept // piece_blocks)
        self._last = num_pieces.cumsum() - 1  # the last piece of each request; padding stands in front of its first
        where = np.arange(len(kept)) + ((self._last + 1) * piece_blocks - num_kept.cumsum())[owner]
        total = int(num_pieces.sum())
        block_ids, ordinals = np.zeros((2, total * piece_blocks), dtype=np.int64)
        block_ids[where] = np.concatenate([request.block_ids for request in requests])[kept]
        ordinals[where] = kept - (ends - counts)[owner]
        hidden = np.ones((total * piece_blocks, size), dtype=np.bool_)
        hidden[where] = is_hidden[kept]
        slots = ordinals[:, None] * size + np.arange(size)
        self.owner = torch.from_numpy(np.arange(len(requests)).repeat(num_pieces))
        self.hidden, self.slots = (torch.from_numpy(each.reshape(total, -1)) for each in (hidden, slots))
        self._block_ids = torch.from_numpy(block_ids)
        self._columns, self._rows = map(torch.from_numpy, self._index(lengths))

    def _index(self, lengths: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """K is read in columns of a block, V in rows of a token. A hidden row of V reads a live one instead.

        Its weight is zero, and zero times what lies in a dead slot might be NaN.
        """
        packing, (num_pieces, piece_slots) = self._packing, self.hidden.shape
        blocks = self._block_ids.numpy() if packing.is_plain else np.arange(len(self._block_ids))
        heads = np.arange(self._num_heads)[:, None]
        regions = blocks.reshape(num_pieces, 1, -1) * self._num_heads + heads  # [pieces, kv heads, blocks]
        columns = regions[:, :, None] * (2 * packing.head_size) + np.arange(packing.head_size)[:, None]
        rows = regions[..., None] * (2 * packing.block_size) + packing.block_size + np.arange(packing.block_size)
        rows = rows.reshape(num_pieces, self._num_heads, piece_slots)
        live = rows[self._last, :, piece_slots - packing.block_size + (lengths - 1) % packing.block_size]
        rows = np.where(self.hidden.numpy()[:, None], live[self.owner.numpy()][..., None], rows)
        return columns.ravel(), rows.ravel()

    def keys(self, cache: torch.Tensor) -> torch.Tensor:
        """float32 ``[num_pieces, num_kv_heads, head_size, piece_slots]``; hidden slots hold anything."""
        num_pieces, piece_slots = self.hidden.shape
        shape = num_pieces, self._num_heads, self._packing.head_size, piece_slots
        return self._scratch.read(self._plain(cache).view(-1, self._packing.block_size), self._columns, shape)

    def values(self, cache: torch.Tensor) -> torch.Tensor:
        """float32 ``[num_pieces, num_kv_heads, piece_slots, head_size]``; overwrites the keys."""
        num_pieces, piece_slots = self.hidden.shape
        shape = num_pieces, self._num_heads, piece_slots, self._packing.head_size
        return self._scratch.read(self._plain(cache).view(-1, self._packing.head_size), self._rows, shape)

    def _plain(self, cache: torch.Tensor) -> torch.Tensor:
        return cache if self._packing.is_plain else self._packing.unpacked(cache, self._block_ids)
