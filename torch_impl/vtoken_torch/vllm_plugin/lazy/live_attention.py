"""Attention of rows with dead slots, in plain torch. Index tensors are made once a step and serve all layers."""

from collections.abc import Iterator, Sequence
from typing import Protocol

import torch

from vtoken_torch.vllm_plugin.lazy.pieces import Packing, Pieces, Scratch, Visible
from vtoken_torch.vllm_plugin.mass.queries import Heads

__all__ = ["LiveChunk", "LiveDecode", "LiveRows"]

_PIECE_BLOCKS = 8
_TILE = 1 << 18  # logits of one head at once: a chunk's memory stays bounded, whatever the context


class LiveRows(Protocol):
    """Some rows of a step."""

    def attend(self, query: torch.Tensor, cache: torch.Tensor, heads: Heads, output: torch.Tensor) -> None:
        """A layer. Writes the rows' tokens of ``output``; like ``query``, ``[num_tokens, num_heads, head_size]``."""
        ...


class LiveDecode(LiveRows):
    """One query each: all requests at once."""

    def __init__(
        self,
        requests: Sequence[Visible],
        tokens: torch.Tensor,
        packing: Packing,
        num_kv_heads: int,
        scratch: Scratch,
    ) -> None:
        """``tokens``: int64 ``[len(requests)]``, each one's query."""
        self._tokens = tokens
        piece_blocks = min(_PIECE_BLOCKS, max(len(request.block_ids) for request in requests))
        self._pieces = Pieces(requests, packing, num_kv_heads, piece_blocks, scratch)

    def attend(self, query: torch.Tensor, cache: torch.Tensor, heads: Heads, output: torch.Tensor) -> None:
        """Softmax within each piece, then pieces are weighed by the sum of their exponentials."""
        keys = self._pieces.keys(cache)
        owner, (num_pieces, num_kv_heads, head_size, _) = self._pieces.owner, keys.shape
        queries = query[self._tokens].float().view(len(self._tokens), num_kv_heads, -1, head_size) * heads.scale
        logits = heads.capped(queries.index_select(0, owner) @ keys)
        logits.masked_fill_(self._pieces.hidden[:, None, None], -torch.inf)
        weights = logits.softmax(-1)
        outputs = (weights @ self._pieces.values(cache)).view(num_pieces, -1, head_size)
        # The greatest weight is 1 / sum(exp(logits - max)).
        lse = (logits.amax(-1) - weights.amax(-1).log()).view(num_pieces, -1)
        shares = _shares(lse, owner, len(self._tokens), heads.sinks)
        result = output.new_zeros(len(self._tokens), *outputs.shape[1:], dtype=torch.float32)
        result.index_add_(0, owner, outputs * shares.unsqueeze(-1))
        output.index_copy_(0, self._tokens, result.to(output.dtype))


class LiveChunk(LiveRows):
    """The queries of one request's chunk, which stand in its last slots."""

    def __init__(
        self,
        request: Visible,
        first: int,
        num_queries: int,
        packing: Packing,
        num_kv_heads: int,
        scratch: Scratch,
    ) -> None:
        """``first``: of the ``num_queries`` tokens in the batch."""
        self._pieces = Pieces([request], packing, num_kv_heads, len(request.block_ids), scratch)
        self._first, self._num_queries, self._length = first, num_queries, request.length

    def attend(self, query: torch.Tensor, cache: torch.Tensor, heads: Heads, output: torch.Tensor) -> None:
        """A plain masked softmax, tile by tile."""
        keys = self._pieces.keys(cache).squeeze(0).clone()  # each tile needs both
        values = self._pieces.values(cache).squeeze(0)
        num_kv_heads, head_size, num_slots = keys.shape
        for first, last, hidden in self._tiles(num_slots):
            tile = slice(self._first + first, self._first + last)
            queries = query[tile].float().view(last - first, num_kv_heads, -1, head_size).transpose(0, 1) * heads.scale
            logits = heads.capped(queries.flatten(1, 2) @ keys).view(*queries.shape[:3], num_slots)
            logits.masked_fill_(hidden[:, None], -torch.inf)
            weights = logits.softmax(-1)
            if heads.sinks is not None:
                lse = logits.amax(-1) - weights.amax(-1).log()
                weights *= (lse - heads.sinks.float().view(num_kv_heads, 1, -1)).sigmoid().unsqueeze(-1)
            result = (weights.flatten(1, 2) @ values).view(*queries.shape).transpose(0, 1)
            output[tile] = result.reshape(last - first, -1, head_size).to(output.dtype)

    def _tiles(self, num_slots: int) -> Iterator[tuple[int, int, torch.Tensor]]:
        """(first query, last + 1, what each must not see)."""
        dead, slots = self._pieces.hidden, self._pieces.slots
        size = max(1, _TILE // num_slots)
        for first in range(0, self._num_queries, size):
            last = min(first + size, self._num_queries)
            own_slots = self._length - self._num_queries + torch.arange(first, last)
            yield first, last, dead | (slots > own_slots[:, None])


def _shares(lse: torch.Tensor, owner: torch.Tensor, num_rows: int, sinks: torch.Tensor | None) -> torch.Tensor:
    """What part of its row's softmax each piece has: ``[num_pieces, num_heads]``, as ``lse``."""
    top = lse.new_full((num_rows, lse.shape[1]), -torch.inf)
    top.scatter_reduce_(0, owner[:, None].expand_as(lse), lse, "amax")
    if sinks is not None:
        top = top.maximum(sinks.float())
    weights = (lse - top[owner]).exp()
    total = torch.zeros_like(top).index_add_(0, owner, weights)
    if sinks is not None:
        total += (sinks.float() - top).exp()
    return weights / total[owner]
