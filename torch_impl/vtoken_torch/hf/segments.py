"""Attention of parts of a packed batch over live tokens, in plain PyTorch: dead and unwritten slots are never read.

Index tensors and masks are made once and serve all layers. Keys and values are never repeated for the query heads
that share them.
"""

from collections.abc import Sequence
from typing import Final, Protocol

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from vtoken.policies.base import MassNeed
from vtoken_torch.hf.mass import MassBook

__all__ = ["ChunkSegment", "DecodeSegment", "Segment"]

_TILE: Final = 1 << 22  # logits at once where weights are wanted: 16 MB


class Segment(Protocol):
    """Consecutive tokens of the packed batch. ``num_tokens``: how many."""

    num_tokens: int

    def attend(self, query: Tensor, kv: Tensor, scale: float) -> Tensor:
        """One layer.

        Args:
            query: ``[num_query_heads, num_tokens, head_size]``.
            kv: ``[2, num_slots, num_kv_heads * head_size]``, keys and values, the step's tokens written.
            scale: of the logits.

        Returns:
            ``[num_tokens, num_query_heads, head_size]``.
        """
        ...

    def report(self, book: MassBook, num_layers: int) -> None:
        """Enters the mass of the step, all layers done, if it was collected."""
        ...


class _Gather:
    """Rows of some slots, read into the same memory in every layer: fresh memory costs a page fault for every 4 KB."""

    def __init__(self, slots: Tensor, shape: tuple[int, int], kv: Tensor) -> None:
        self._slots = slots
        self._shape = shape
        self._rows = kv.new_empty(2, len(slots), kv.shape[2])

    def __call__(self, kv: Tensor, head_size: int) -> Tensor:
        """``[2, rows, num_kv_heads, tokens, head_size]`` for ``shape`` (rows, tokens)."""
        torch.index_select(kv, 1, self._slots, out=self._rows)
        return self._rows.view(2, *self._shape, -1, head_size).transpose(2, 3)


class DecodeSegment:
    """Rows that write one token each, at once: their live tokens gathered, padded to the longest row.

    Args:
        rows: of the store's tables.
        slots: ``[total]`` int64, the live slots of the rows, one row after another, in any order within a row.
        counts: live tokens of each row.
        positions: ``[num_slots]`` int32 of the pool.
        query_positions: ``[len(rows)]`` int64.
        kv: of any layer.
        need: collects mass.
    """

    def __init__(
        self,
        rows: Sequence[int],
        slots: Tensor,
        counts: Sequence[int],
        positions: Tensor,
        query_positions: Tensor,
        kv: Tensor,
        need: MassNeed | None,
    ) -> None:
        self.num_tokens = len(rows)
        self._rows, self._query_positions = rows, query_positions
        device = slots.device
        longest = max(counts)
        if min(counts) == longest:
            index, self._mask = slots, None
        else:  # a padding place repeats the row's last live token: nothing unwritten is read, and the mask hides it
            lens = torch.tensor(counts, device=device).unsqueeze(1)
            places = torch.arange(longest, device=device)
            index = slots[lens.cumsum(0) - lens + places.minimum(lens - 1)].flatten()
            mask = torch.zeros(len(rows), longest, dtype=kv.dtype, device=device)
            self._mask = mask.masked_fill_(places >= lens, -torch.inf)[:, None, None]
        self._gather = _Gather(index, (len(rows), longest), kv)
        self._positions, self._mass = None, None
        if need is not None:
            self._positions = positions[index].view(len(rows), longest)
            self._mass = torch.zeros(len(rows), longest, device=device)

    def attend(self, query: Tensor, kv: Tensor, scale: float) -> Tensor:
        k, v = self._gather(kv, query.shape[2])
        q = query.transpose(0, 1).unsqueeze(2)
        if self._mass is None:
            return _attend(q, k, v, self._mask, scale).squeeze(2)
        weights, out = _weigh(q, k, v, self._mask, scale)
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
        positions: ``[num_slots]`` int32 of the pool.
        query_positions: ``[num_tokens]`` int64.
        kv: of any layer.
        need: collects mass.
    """

    def __init__(
        self,
        row: int,
        slots: Tensor,
        positions: Tensor,
        query_positions: Tensor,
        kv: Tensor,
        need: MassNeed | None,
    ) -> None:
        self.num_tokens = count = len(query_positions)
        self._row, self._query_positions = row, query_positions
        self._gather = _Gather(slots, (1, len(slots)), kv)
        self._positions = positions[slots]
        hidden = self._positions > query_positions.unsqueeze(1)
        self._mask = torch.zeros(hidden.shape, dtype=kv.dtype, device=slots.device).masked_fill_(hidden, -torch.inf)
        self._weights, self._mass = None, None
        if need is not None:
            self._weights = _query_weights(need, count, slots.device)
            self._mass = torch.zeros(len(self._weights), len(slots), device=slots.device)

    def attend(self, query: Tensor, kv: Tensor, scale: float) -> Tensor:
        num_heads, count, head_size = query.shape
        k, v = self._gather(kv, head_size)
        q = query.unsqueeze(0)
        if self._weights is None or self._mass is None:
            return _attend(q, k, v, self._mask, scale)[0].transpose(0, 1)
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
            book.add([self._row], queries, self._positions.unsqueeze(0), masses, self.num_tokens)


def _attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """``[rows, num_query_heads, num_queries, head_size]``, like ``q``."""
    return scaled_dot_product_attention(q, k, v, mask, scale=scale, enable_gqa=q.shape[1] != k.shape[1])


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
    return torch.pow(torch.tensor(need.decay, device=device), age).unsqueeze(0)
