"""A step over a packed batch: rows that decode first, then chunks. Index tensors are made here, once for all layers."""

from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any, TypeAlias

import torch
from torch import Tensor

from vtoken.policies.base import MassNeed
from vtoken.serving.protocol import StepRow
from vtoken_torch.hf.cache import PagedCache
from vtoken_torch.hf.mass import MassBook
from vtoken_torch.hf.segments import ChunkSegment, DecodeSegment, PackedSegment, Segment
from vtoken_torch.kv_store import TorchKVStore
from vtoken_torch.upload import upload

__all__ = ["MakeDecode", "StepPlan"]

MakeDecode: TypeAlias = Callable[[Sequence[int], Tensor], Segment]
"""(rows, ``query_positions``) -> attention of rows that decode, where a kernel reads the tables itself."""


class StepPlan:
    """Tensors of one step; ``LayerAttention`` of its forward pass.

    Args:
        store: its tables hold the step's tokens; their positions are written here.
        cache: is told where the tokens go.
        rows: the step.
        need: collects mass.
        make_decode: instead of ``PackedSegment`` and ``DecodeSegment``.

    Attributes:
        token_ids, positions, slots: ``[num_tokens]`` int64, in packed order.
        shape: of the model's inputs. ``(1, num_tokens)``; where every row has one token ``(num_tokens, 1)``, so that
            the model finds a token's heads side by side.
        keep: what the model is to keep as ``logits_to_keep``.
    """

    def __init__(
        self,
        store: TorchKVStore,
        cache: PagedCache,
        rows: Sequence[StepRow],
        need: MassNeed | None,
        make_decode: MakeDecode | None = None,
    ) -> None:
        decodes = [row for row in rows if len(row.token_ids) == 1]
        chunks = [row for row in rows if len(row.token_ids) > 1]
        packed = [*decodes, *chunks]
        self.shape = (1, -1) if chunks else (-1, 1)
        device = store.cache.device
        last, end = {}, 0
        for row in packed:
            end += len(row.token_ids)
            last[row.row] = end - 1
        tokens, slots = [row.token_ids for row in packed], [row.slots for row in packed]
        positions = [range(row.start, row.start + len(row.token_ids)) for row in packed]
        host = [list(chain.from_iterable(parts)) for parts in (tokens, positions, slots)]
        self.token_ids, self.positions, self.slots = upload(host, device)
        wanted = [last[row.row] for row in rows if row.sampling is not None]
        self._sampled = None if not chunks and len(wanted) == len(rows) else upload(wanted, device)
        self.keep: int | Tensor = 1 if self._sampled is None or not chunks else self._sampled
        store.cache.positions.index_copy_(0, self.slots, self.positions.int())
        cache.slots = self.slots
        self._cache, self._layer_kv = cache, cache.layer_kv
        self._segments: list[Segment] = []
        if decodes:
            members = [row.row for row in decodes]
            if make_decode is None:
                self._segments.append(self._decode(store, members, need))
            else:
                self._segments.append(make_decode(members, self.positions[: len(members)]))
        if chunks:
            self._add_chunks(store, chunks, len(decodes), need)

    def attend(self, layer: int, query: Tensor, value: Tensor, scale: float, extras: dict[str, Any]) -> Tensor:
        kv = self._layer_kv[layer]
        # [num_query_heads, num_tokens, head_size]: of the batch and its length one is 1
        heads = query.transpose(0, 1).flatten(1, 2)
        if len(self._segments) == 1:
            out = self._segments[0].attend(heads, kv, scale)
        else:
            parts, first = [], 0
            for segment in self._segments:
                end = first + segment.num_tokens
                parts.append(segment.attend(heads[:, first:end], kv, scale))
                first = end
            out = torch.cat(parts)
        return out.view(*self.shape, *out.shape[1:])

    def wanted(self, logits: Tensor) -> Tensor:
        """Of the model's logits those that are wanted, ``[n, vocab_size]``, in the order of the rows given."""
        flat = logits.flatten(0, 1)
        return flat if self._sampled is None or self._sampled is self.keep else flat[self._sampled]

    def report(self, book: MassBook) -> None:
        """Enters the mass that was collected, once all layers are done."""
        for segment in self._segments:
            segment.report(book, len(self._layer_kv))

    def _decode(self, store: TorchKVStore, rows: Sequence[int], need: MassNeed | None) -> Segment:
        packed = store.tables.find_blocks(rows) if need is None else None
        if packed is not None:
            return PackedSegment(*packed, self._cache)
        slots, counts = store.tables.find_live(rows)
        return DecodeSegment(rows, slots, counts, self._cache, self.positions[: len(rows)], need)

    def _add_chunks(self, store: TorchKVStore, chunks: Sequence[StepRow], first: int, need: MassNeed | None) -> None:
        slots, counts = store.tables.find_live([row.row for row in chunks])
        for row, live in zip(chunks, torch.split(slots, counts), strict=True):
            queries = self.positions[first : first + len(row.token_ids)]
            self._segments.append(ChunkSegment(row.row, live, self._cache, queries, need))
            first += len(queries)
