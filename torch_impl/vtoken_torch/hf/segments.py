"""Attention of parts of a packed batch over live tokens, in plain PyTorch: it reads no dead and no unwritten slot.

Index tensors and masks are made once and serve all layers. Keys and values are gathered, whole blocks where a row has
no holes, else head by head, so that a head's tokens lie side by side. They are never repeated for the query heads that
share them.
"""

from collections.abc import Sequence
from typing import Final, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from vtoken.policies.base import MassNeed
from vtoken_torch.hf.cache import PagedCache
from vtoken_torch.hf.mass import MassBook
from vtoken_torch.upload import upload

__all__ = ["ChunkSegment", "DecodeSegment", "PackedSegment", "Segment"]

_TILE: Final = 1 << 22  # logits at once where weights are wanted: 16 MB


class Segment(Protocol):
    """Consecutive tokens of the packed batch. ``num_tokens``: how many."""

    num_tokens: int

    def attend(self, query: Tensor, kv: Tensor, scale: float) -> Tensor:
        """One layer.

        Args:
            query: ``[num_query_heads, num_tokens, head_size]``.
            kv: a layer of ``PagedCache.layer_kv``, the step's tokens written.
            scale: of the logits.

        Returns:
            ``[num_tokens, num_query_heads, head_size]``.
        """
        ...

    def report(self, book: MassBook, num_layers: int) -> None:
        """Enters the mass of the step, all layers done, if it was collected."""
        ...


class _Gather:
    """Keys and values of some slots, ``[rows, tokens]`` int64, one layer after another in the cache's scratch."""

    def __init__(self, slots: Tensor, cache: PagedCache) -> None:
        heads = torch.arange(cache.num_kv_heads, device=slots.device).unsqueeze(1)
        where = slots.unsqueeze(1) * cache.num_kv_heads + heads  # [rows, num_kv_heads, tokens]
        self._where = where.flatten()
        self._gathered = cache.scratch(2, len(self._where), cache.head_size)
        self._keys, self._values = self._gathered.view(2, *where.shape, -1)

    def __call__(self, kv: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values, each ``[rows, num_kv_heads, tokens, head_size]``."""
        torch.index_select(kv.view(2, -1, kv.shape[-1]), 1, self._where, out=self._gathered)
        return self._keys, self._values


class PackedSegment:
    """Rows that write one token each, at once, and have no holes: their blocks are gathered whole. Collects no mass.

    Args:
        blocks: ``[rows, blocks]``, as ``DeviceTables.find_blocks`` gives them.
        counts: live tokens of each row, ``[rows]``.
        cache: of the pool.
    """

    def __init__(self, blocks: NDArray[np.int64], counts: NDArray[np.int64], cache: PagedCache) -> None:
        num_heads, head_size, block_size = cache.num_kv_heads, cache.head_size, cache.block_size
        device, longest, width = cache.positions.device, int(counts.max()), blocks.shape[1] * block_size
        self.num_tokens = num_rows = len(blocks)
        where = np.stack((blocks, blocks + len(cache.positions) // block_size))  # keys, then values
        self._blocks = upload(where.reshape(-1), device)
        self._gathered = cache.scratch(len(self._blocks), block_size * num_heads * head_size)
        tokens = self._gathered.view(2, num_rows, width, num_heads, head_size)
        self._keys, self._values = tokens[:, :, :longest].transpose(2, 3)
        self._tails, self._mask = None, None
        if counts.min() < longest:  # padding blocks hold live tokens, slots behind a row's last token hold anything
            lens, places = counts[:, None], np.arange(width)
            is_tail = (places >= lens) & (places < -(-lens // block_size) * block_size)
            self._tails = upload(np.flatnonzero(np.stack((is_tail, is_tail))), device)
            self._mask = _padding_mask(upload(counts, device), longest, cache.dtype)

    def attend(self, query: Tensor, kv: Tensor, scale: float) -> Tensor:
        torch.index_select(kv.view(-1, self._gathered.shape[1]), 0, self._blocks, out=self._gathered)
        if self._tails is not None:
            self._gathered.view(-1, kv.shape[1] * self._keys.shape[1]).index_fill_(0, self._tails, 0.0)
        return _attend_grouped(query.transpose(0, 1), self._keys, self._values, self._mask, scale)

    def report(self, book: MassBook, num_layers: int) -> None:
        """There is none."""


class DecodeSegment:
    """Rows that write one token each, at once: their live tokens, gathered wherever they are, padded to the longest.

    Args:
        rows: of the store's tables.
        slots: ``[total]`` int64, the live slots of the rows, one row after another, in any order within a row.
        counts: live tokens of each row.
        cache: of the pool.
        query_positions: ``[len(rows)]`` int64.
        need: collects mass.
    """

    def __init__(
        self,
        rows: Sequence[int],
        slots: Tensor,
        counts: Sequence[int],
        cache: PagedCache,
        query_positions: Tensor,
        need: MassNeed | None,
    ) -> None:
        self.num_tokens = len(rows)
        self._query_positions, device = query_positions, slots.device
        longest = max(counts)
        if min(counts) == longest:
            index, self._mask = slots.view(len(rows), longest), None
        else:  # a padding place repeats the row's last live token: nothing unwritten is read, and the mask hides it
            lens = upload(counts, device)
            ends = lens.cumsum(0).unsqueeze(1)
            places = torch.arange(longest, device=device).minimum(lens.unsqueeze(1) - 1)
            index = slots[ends - lens.unsqueeze(1) + places]
            self._mask = _padding_mask(lens, longest, cache.dtype)
        self._gather = _Gather(index, cache)
        self._positions, self._mass = None, None
        if need is not None:
            self._rows = upload(rows, device)
            self._positions = cache.positions[index]
            self._mass = torch.zeros(len(rows), longest, device=device)

    def attend(self, query: Tensor, kv: Tensor, scale: float) -> Tensor:
        k, v = self._gather(kv)
        q = query.transpose(0, 1)
        if self._mass is None:
            return _attend_grouped(q, k, v, self._mask, scale)
        weights, out = _weigh(q.unsqueeze(2), k, v, self._mask, scale)
        self._mass += weights.sum((1, 2))
        return out.squeeze(2)

    def report(self, book: MassBook, num_layers: int) -> None:
        if self._mass is not None and self._positions is not None:
            masses = (self._mass / num_layers).unsqueeze(1)
            book.add(self._rows, self._query_positions.unsqueeze(1), self._positions, masses)


class ChunkSegment:
    """Several consecutive tokens of one row: a prompt's chunk over what is live of the row.

    Args:
        row: of the store's tables.
        slots: ``[num_live_tokens]`` int64, any order.
        cache: of the pool.
        query_positions: ``[num_tokens]`` int64.
        need: collects mass.
    """

    def __init__(
        self,
        row: int,
        slots: Tensor,
        cache: PagedCache,
        query_positions: Tensor,
        need: MassNeed | None,
    ) -> None:
        self.num_tokens = count = len(query_positions)
        self._query_positions = query_positions
        self._gather = _Gather(slots.unsqueeze(0), cache)
        self._positions = cache.positions[slots]
        hidden = self._positions > query_positions.unsqueeze(1)
        self._mask = torch.zeros(hidden.shape, dtype=cache.dtype, device=slots.device).masked_fill_(hidden, -torch.inf)
        self._weights, self._mass = None, None
        if need is not None:
            self._row = upload([row], slots.device)
            self._weights = _query_weights(need, count, slots.device)
            self._mass = torch.zeros(len(self._weights), len(slots), device=slots.device)

    def attend(self, query: Tensor, kv: Tensor, scale: float) -> Tensor:
        num_heads, count, _ = query.shape
        k, v = self._gather(kv)
        q = query.unsqueeze(0)
        if self._weights is None or self._mass is None:
            is_shared = num_heads != k.shape[1]
            out = scaled_dot_product_attention(q, k, v, self._mask, scale=scale, enable_gqa=is_shared)
            return out[0].transpose(0, 1)
        out = torch.empty_like(q)
        step = max(1, _TILE // (num_heads * k.shape[2]))
        for first in range(0, count, step):
            part = slice(first, first + step)
            weights, out[:, :, part] = _weigh(q[:, :, part], k, v, self._mask[part], scale)
            self._mass += self._weights[:, part] @ weights.sum((0, 1))
        return out[0].transpose(0, 1)

    def report(self, book: MassBook, num_layers: int) -> None:
        if self._mass is not None:
            queries = self._query_positions[-len(self._mass) :].unsqueeze(0)
            masses = (self._mass / num_layers).unsqueeze(0)
            book.add(self._row, queries, self._positions.unsqueeze(0), masses, self.num_tokens)


def _padding_mask(lens: Tensor, longest: int, dtype: torch.dtype) -> Tensor:
    """``[rows, 1, 1, longest]``, what is added to the logits of rows of ``lens`` tokens."""
    places = torch.arange(longest, device=lens.device)
    mask = torch.zeros(len(lens), longest, dtype=dtype, device=lens.device)
    return mask.masked_fill_(places >= lens.unsqueeze(1), -torch.inf)[:, None, None]


def _attend_grouped(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """One query of each row, ``[rows, num_query_heads, head_size]``.

    The query heads of one KV head are so many queries: its keys are read once for all.
    """
    grouped = q.reshape(len(q), k.shape[1], -1, q.shape[2])
    return scaled_dot_product_attention(grouped, k, v, mask, scale=scale).reshape(q.shape)


def _weigh(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float) -> tuple[Tensor, Tensor]:
    """Softmax weights ``[rows, num_query_heads, num_queries, tokens]`` in float32, and the output, like ``q``."""
    rows, num_heads, num_queries, head_size = q.shape
    num_grouped = num_heads // k.shape[1] * num_queries
    grouped = q.reshape(rows, k.shape[1], num_grouped, head_size)  # the query heads of one KV head, one after another
    scores = torch.matmul(grouped.float() * scale, k.float().transpose(2, 3)).view(rows, num_heads, num_queries, -1)
    weights = (scores if mask is None else scores.add_(mask)).softmax(-1)
    out = torch.matmul(weights.to(v.dtype).view(*grouped.shape[:3], -1), v)
    return weights, out.view(q.shape)


def _query_weights(need: MassNeed, num_queries: int, device: torch.device) -> Tensor:
    """``[kept, num_queries]``: how the rows of queries add up to the rows that are kept."""
    if need.window:
        kept = min(need.window, num_queries)
        return torch.eye(num_queries, device=device)[num_queries - kept :]
    age = torch.arange(num_queries - 1, -1, -1, device=device)
    return torch.pow(need.decay, age).unsqueeze(0)
