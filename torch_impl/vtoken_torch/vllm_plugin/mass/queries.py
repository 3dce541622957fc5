"""Attention mass of chosen queries, from the keys in vLLM's CPU cache. Plain torch; index tensors serve all layers.

A query's mass row: its attention to each token that it sees, summed over query heads. Tokens lie in packed order, so
that a request's first ``seq_len`` slots are all live, and those of a chunk come last, in order. In lazy mode some of
them may be dead: they have columns too, and no mass.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from vtoken.types import ReqId, cdiv
from vtoken_torch.upload import upload

__all__ = ["Ask", "ChunkRows", "DecodeRows", "Heads", "KeyReader", "MassRows", "Metadata", "ReadsKeys", "rows_of"]

_TILE = 1 << 18  # logits of one head at once: a chunk's memory stays bounded, whatever the context


@dataclass(frozen=True, slots=True)
class Ask:
    """Who asks for mass in a step. All of it is known on the host, so that nothing waits for a device.

    Attributes:
        row: of the batch.
        window: as in ``MassNeed``.
        start: index of its first token among the step's.
        num_tokens: that it has in the step.
        length: its slots up to the cursor, those of the step included.
    """

    req_id: ReqId
    row: int
    window: int
    start: int
    num_tokens: int
    length: int


@dataclass(frozen=True, slots=True)
class Heads:
    """A layer's attention. ``sinks``: ``[num_query_heads]``, logits that take part in each softmax, or None."""

    scale: float
    softcap: float = 0.0
    sinks: torch.Tensor | None = None

    def capped(self, logits: torch.Tensor) -> torch.Tensor:
        """Logits as vLLM's kernel has them before the mask."""
        return torch.tanh(logits / self.softcap) * self.softcap if self.softcap else logits


class Metadata(Protocol):
    """What is read of vLLM's attention metadata, by row of the batch."""

    block_table: torch.Tensor


class ReadsKeys(Protocol):
    """Reads keys by block."""

    def read(self, cache: torch.Tensor, block_ids: torch.Tensor) -> torch.Tensor:
        """float32 ``[len(block_ids), num_kv_heads, head_size, block_size]``."""
        ...


class KeyReader:
    """Of the CPU's cache. ``offsets``: ``[block_size, head_size]``, where K's elements lie in a (block, head)."""

    def __init__(self, offsets: torch.Tensor) -> None:
        self.block_size, self._head_size = offsets.shape
        by_columns = torch.arange(offsets.numel()).view(self._head_size, self.block_size)
        self._gather = None if torch.equal(offsets.T, by_columns) else offsets.T

    def read(self, cache: torch.Tensor, block_ids: torch.Tensor) -> torch.Tensor:
        """As ``ReadsKeys`` has it."""
        size = self.block_size * self._head_size
        keys = cache.view(*cache.shape[:2], 2 * size)[..., :size].index_select(0, block_ids)
        if self._gather is not None:
            return keys[..., self._gather].float()
        return keys.view(*keys.shape[:2], self._head_size, self.block_size).float()


class MassRows(ABC):
    """Sums of equal queries over the layers that were added.

    Attributes:
        masses: float32; the layout is the class's own, the same on all tensor-parallel ranks.
    """

    masses: torch.Tensor

    @abstractmethod
    def add(self, query: torch.Tensor, cache: torch.Tensor, reader: ReadsKeys, heads: Heads) -> None:
        """Adds a layer. ``query``: ``[num_tokens, num_query_heads, head_size]`` of the whole batch."""

    @abstractmethod
    def split(self, masses: torch.Tensor) -> dict[ReqId, torch.Tensor]:
        """``masses`` by request: ``[rows, seq_len]``, as ``KeptMass.add`` wants them."""


class DecodeRows(MassRows):
    """One query each: all requests at once, as a ragged batch of blocks."""

    def __init__(
        self, asks: Sequence[Ask], metadata: Metadata, block_size: int, dead: Mapping[int, torch.Tensor]
    ) -> None:
        self._req_ids, self._lens = [ask.req_id for ask in asks], [ask.length for ask in asks]
        lens = np.array(self._lens)
        counts = (lens + block_size - 1) // block_size
        self._counts, ends = counts.tolist(), counts.cumsum()
        owner = np.repeat(np.arange(len(asks)), counts)  # of each block
        rows, ordinal = np.array([ask.row for ask in asks])[owner], np.arange(len(owner)) - (ends - counts)[owner]
        device = metadata.block_table.device
        rows_of_blocks, ordinals, self._owner = upload(np.stack([rows, ordinal, owner]), device)
        self._block_ids = metadata.block_table[rows_of_blocks, ordinals].long()
        starts = [ask.start for ask in asks]
        filled = lens - (counts - 1) * block_size
        self._tokens, self._last, filled_of_last = upload(np.stack([starts, ends - 1, filled]), device)
        self._hidden = (torch.arange(block_size, device=device) >= filled_of_last[:, None])[:, None]
        first_slots = ((ends - counts) * block_size).tolist()
        in_rows = [first + dead[ask.row] for ask, first in zip(asks, first_slots, strict=True) if ask.row in dead]
        slots = torch.cat(in_rows) if in_rows else None
        self._dead = None if slots is None else (slots // block_size, slots % block_size)  # blocks, offsets
        self.masses = torch.zeros(len(owner), block_size, device=device)

    def add(self, query: torch.Tensor, cache: torch.Tensor, reader: ReadsKeys, heads: Heads) -> None:
        """Softmax over a request's blocks: by block first, then brought together by its owner."""
        keys = reader.read(cache, self._block_ids)
        num_blocks, num_kv_heads, head_size, block_size = keys.shape
        queries = query[self._tokens].float().view(len(self._tokens), num_kv_heads, -1, head_size) * heads.scale
        logits = heads.capped(queries.index_select(0, self._owner) @ keys).view(num_blocks, -1, block_size)
        logits[self._last] = logits[self._last].masked_fill_(self._hidden, -torch.inf)
        if self._dead is not None:
            blocks, offsets = self._dead
            logits[blocks, :, offsets] = -torch.inf
        top = logits.new_full((len(self._tokens), logits.shape[1]), -torch.inf)
        top.scatter_reduce_(0, self._owner[:, None].expand(-1, logits.shape[1]), logits.amax(-1), "amax")
        if heads.sinks is not None:
            top = top.maximum(heads.sinks.float())
        weights = logits.sub_(top.index_select(0, self._owner).unsqueeze(-1)).exp_()
        total = torch.zeros_like(top).index_add_(0, self._owner, weights.sum(-1))
        if heads.sinks is not None:
            total += (heads.sinks.float() - top).exp()
        shares = total.reciprocal()[self._owner].unsqueeze(1)  # [blocks, 1, query heads]
        self.masses += (shares @ weights).squeeze(1)

    def split(self, masses: torch.Tensor) -> dict[ReqId, torch.Tensor]:
        """One row for each request."""
        parts = torch.split(masses, self._counts)
        return {
            req_id: part.reshape(1, -1)[:, :length]
            for req_id, part, length in zip(self._req_ids, parts, self._lens, strict=True)
        }


class ChunkRows(MassRows):
    """The last queries of one request's chunk: all of them for a sum, else the window's."""

    def __init__(self, ask: Ask, metadata: Metadata, block_size: int, dead: torch.Tensor | None) -> None:
        length, self._end = ask.length, ask.start + ask.num_tokens
        num_queries = min(ask.window, ask.num_tokens) if ask.window else ask.num_tokens
        self._req_id, self._is_sum = ask.req_id, not ask.window
        self._block_ids = metadata.block_table[ask.row, : cdiv(length, block_size)].long()
        self._tiles = list(self._tiled(num_queries, length, dead))
        self.masses = torch.zeros(1 if self._is_sum else num_queries, length)

    @staticmethod
    def _tiled(num_queries: int, length: int, dead: torch.Tensor | None) -> Sequence[tuple[int, int, torch.Tensor]]:
        """(first query, last query + 1, what each must not see); queries count from the first that is asked for."""
        size = max(1, _TILE // length)
        tiles = []
        for first in range(0, num_queries, size):
            last = min(first + size, num_queries)
            num_seen = length - num_queries + last
            hidden = torch.ones(last - first, num_seen, dtype=torch.bool).triu(num_seen - (last - first) + 1)
            if dead is not None:
                hidden[:, dead[dead < num_seen]] = True
            tiles.append((first, last, hidden))
        return tiles

    def add(self, query: torch.Tensor, cache: torch.Tensor, reader: ReadsKeys, heads: Heads) -> None:
        """A plain masked softmax, tile by tile."""
        keys = reader.read(cache, self._block_ids).permute(1, 2, 0, 3).flatten(2)  # [kv heads, head size, slots]
        num_queries = self._tiles[-1][1]
        queries = query[self._end - num_queries : self._end].float() * heads.scale
        queries = queries.view(num_queries, keys.shape[0], -1, keys.shape[1]).transpose(0, 1)
        for first, last, hidden in self._tiles:
            num_seen = hidden.shape[1]
            logits = heads.capped(queries[:, first:last].flatten(1, 2) @ keys[..., :num_seen])
            logits = logits.view(keys.shape[0], last - first, -1, num_seen).masked_fill_(hidden[:, None], -torch.inf)
            rows = _softmax(logits, heads.sinks).sum((0, 2))
            if self._is_sum:
                self.masses[0, :num_seen] += rows.sum(0)
            else:
                self.masses[first:last, :num_seen] += rows

    def split(self, masses: torch.Tensor) -> dict[ReqId, torch.Tensor]:
        """The one request's rows."""
        return {self._req_id: masses}


def rows_of(
    asks: Sequence[Ask], metadata: Metadata, block_size: int, dead: Mapping[int, torch.Tensor] | None = None
) -> list[MassRows]:
    """The work of one step. ``dead``: dead slots in table order, by row of the batch, where a row has some."""
    dead = dead or {}
    single = [ask for ask in asks if ask.num_tokens == 1]
    rows: list[MassRows] = [DecodeRows(single, metadata, block_size, dead)] if single else []
    return rows + [ChunkRows(ask, metadata, block_size, dead.get(ask.row)) for ask in asks if ask not in single]


def _softmax(logits: torch.Tensor, sinks: torch.Tensor | None) -> torch.Tensor:
    """``logits``: ``[kv heads, queries, query heads of each, slots]``."""
    if sinks is None:
        return logits.softmax(-1)
    column = sinks.float().view(logits.shape[0], 1, -1, 1).expand(*logits.shape[:-1], 1)
    return torch.cat([logits, column], dim=-1).softmax(-1)[..., :-1]
