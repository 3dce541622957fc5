"""A step over a packed batch: rows that decode first, then chunks. Index tensors are made here, once for all layers."""

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from vtoken.policies.base import MassNeed
from vtoken.serving.protocol import StepRow
from vtoken_torch.hf.cache import PagedCache
from vtoken_torch.hf.mass import MassBook
from vtoken_torch.hf.segments import ChunkSegment, DecodeSegment, Segment
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
        make_decode: instead of ``DecodeSegment``.

    Attributes:
        token_ids, positions, slots: ``[num_tokens]`` int64, in packed order.
        sampled: ``[n]`` int64, packed indices of the tokens whose logits are wanted, in the order of the rows given.
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
        device = store.cache.device
        last, end = {}, 0
        for row in packed:
            end += len(row.token_ids)
            last[row.row] = end - 1
        host = [
            [token for row in packed for token in row.token_ids],
            [position for row in packed for position in range(row.start, row.start + len(row.token_ids))],
            [slot for row in packed for slot in row.slots],
        ]
        self.token_ids, self.positions, self.slots = upload(host, device)
        wanted = [last[row.row] for row in rows if row.sampling is not None]
        self.sampled = upload(wanted, device)
        store.cache.positions.index_copy_(0, self.slots, self.positions.int())
        cache.slots = self.slots
        self._cache, self._layer_kv = cache, cache.layer_kv
        self._segments: list[Segment] = []
        kernel_rows = len(decodes) if make_decode else 0
        if make_decode and decodes:
            self._segments.append(make_decode([row.row for row in decodes], self.positions[:kernel_rows]))
        self._add_segments(store, decodes[kernel_rows:], chunks, need)

    def attend(self, layer: int, query: Tensor, value: Tensor, scale: float, extras: dict[str, Any]) -> Tensor:
        kv = self._layer_kv[layer]
        if len(self._segments) == 1:
            return self._segments[0].attend(query.squeeze(0), kv, scale).unsqueeze(0)
        heads, parts, first = query.squeeze(0), [], 0
        for segment in self._segments:
            end = first + segment.num_tokens
            parts.append(segment.attend(heads[:, first:end], kv, scale))
            first = end
        return torch.cat(parts).unsqueeze(0)

    def report(self, book: MassBook) -> None:
        """Enters the mass that was collected, once all layers are done."""
        for segment in self._segments:
            segment.report(book, len(self._layer_kv))

    def _add_segments(
        self, store: TorchKVStore, decodes: Sequence[StepRow], chunks: Sequence[StepRow], need: MassNeed | None
    ) -> None:
        members = [row.row for row in (*decodes, *chunks)]
        if not members:
            return
        slots, counts = store.tables.find_live(members)
        num = len(decodes)
        if decodes:
            live, lens = slots[: sum(counts[:num])], counts[:num]
            queries = self.positions[:num]
            self._segments.append(DecodeSegment(members[:num], live, lens, self._cache, queries, need))
        end = sum(segment.num_tokens for segment in self._segments)
        for row, live in zip(chunks, torch.split(slots, counts)[num:], strict=True):
            queries = self.positions[end : end + len(row.token_ids)]
            self._segments.append(ChunkSegment(row.row, live, self._cache, queries, need))
            end += len(queries)
