"""Attention mass on a GPU: decoding rows by the Triton kernels, whose attention comes with it; plain torch for chunks.

A layer's cache is ``[num_blocks, num_kv_heads, block_size, 2 * head_size]`` with any strides, K and V of a head side by
side, as ``device_layout`` has it.
"""

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor

from vtoken.types import ReqId, cdiv
from vtoken_torch.kernels.decode import paged_decode, token_mass
from vtoken_torch.kernels.decode_tile import WORD_BITS
from vtoken_torch.kernels.decode_workspace import DecodeWorkspace
from vtoken_torch.upload import upload
from vtoken_torch.vllm_plugin.mass.queries import Ask, ChunkRows, DecodeRows, Heads, MassRows, Metadata, ReadsKeys

__all__ = ["KernelRows", "Scratch", "StridedKeys", "device_rows", "first_words"]

_LOGITS = 1 << 26  # that one launch keeps: 256 MiB, whatever batch and context


class StridedKeys:
    """``ReadsKeys`` of a GPU's cache."""

    def read(self, cache: Tensor, block_ids: Tensor) -> Tensor:
        """As ``ReadsKeys`` has it."""
        head_size = cache.shape[3] // 2
        return cache[..., :head_size].index_select(0, block_ids).transpose(2, 3).float()


class Scratch:
    """One ``DecodeWorkspace`` for all layers, made anew when a step needs a larger one."""

    def __init__(self) -> None:
        self._workspace: DecodeWorkspace | None = None
        self._made_for: object = None

    def of(self, num_query_heads: int, cache: Tensor, num_rows: int, num_slots: int) -> DecodeWorkspace:
        """For at least ``num_rows`` rows of ``num_slots`` slots."""
        heads = (num_query_heads, cache.shape[1], cache.shape[3] // 2)
        kept, made_for = self._workspace, (heads, cache.device)
        if kept is None or made_for != self._made_for or kept.max_num_reqs < num_rows or kept.max_tokens < num_slots:
            kept = self._workspace = None  # its memory first
            num_rows, num_slots = (1 << (size - 1).bit_length() for size in (num_rows, num_slots))
            kept = DecodeWorkspace(num_rows, *heads, num_slots, cache.device, with_logits=True)
            self._workspace, self._made_for = kept, made_for
        return kept


class KernelRows(MassRows):
    """One query each, with its attention. Tables are gathered once a step, and serve all layers."""

    def __init__(self, asks: Sequence[Ask], metadata: Metadata, cache: Tensor, scratch: Scratch) -> None:
        block_size = cache.shape[2]
        self._req_ids, self._lengths = [ask.req_id for ask in asks], [ask.length for ask in asks]
        told = [[ask.row for ask in asks], [ask.start for ask in asks], self._lengths]
        rows, self._tokens, lengths = upload(told, cache.device)
        self._scratch = scratch
        width = cdiv(max(self._lengths), block_size)
        self._num_blocks = ((lengths + block_size - 1) // block_size).int()
        self._block_table = metadata.block_table[rows, :width].int()
        self._live_words = first_words(lengths, width, block_size)
        self.masses = torch.zeros(len(asks), width * block_size, device=cache.device)

    def add(self, query: Tensor, cache: Tensor, reader: ReadsKeys, heads: Heads) -> None:
        """Two launches of attention, one of mass, for as many rows at once as the scratch holds."""
        queries = query[self._tokens]
        self._output = torch.empty_like(queries)
        keys, values = cache.transpose(1, 2).chunk(2, dim=-1)
        num_rows, num_slots = self.masses.shape
        step = max(1, min(num_rows, _LOGITS // (queries.shape[1] * num_slots)))
        workspace = self._scratch.of(queries.shape[1], cache, step, num_slots)
        logits = cast(Tensor, workspace.logits)
        for first in range(0, num_rows, step):
            part = slice(first, first + step)
            num_blocks = self._num_blocks[part]
            paged_decode(
                queries[part],
                keys,
                values,
                self._block_table[part],
                num_blocks,
                self._live_words[part],
                scale=heads.scale,
                out=self._output[part],
                workspace=workspace,
                logits=logits,
            )
            token_mass(logits, workspace.lse, num_blocks, self.masses[part], block_size=cache.shape[2])

    def put(self, output: Tensor) -> None:
        """Writes their attention in the last layer into ``output`` ``[num_tokens, num_query_heads, head_size]``."""
        output.index_copy_(0, self._tokens, self._output)

    def split(self, masses: Tensor) -> dict[ReqId, Tensor]:
        """One row for each request."""
        rows = zip(self._req_ids, masses.unsqueeze(1), self._lengths, strict=True)
        return {req_id: row[:, :length] for req_id, row, length in rows}


def first_words(lengths: Tensor, width: int, block_size: int) -> Tensor:
    """Live words of rows whose first ``lengths`` slots are live: int32 ``[num_rows, width, words_per_block]``."""
    firsts = torch.arange(0, block_size, WORD_BITS, device=lengths.device)
    starts = torch.arange(width, device=lengths.device).unsqueeze(1) * block_size + firsts  # [width, words_per_block]
    sizes = (block_size - firsts).clamp(max=WORD_BITS)
    counts = (lengths.long()[:, None, None] - starts).clamp(min=0).minimum(sizes)
    return torch.where(counts < WORD_BITS, (1 << counts.clamp(max=WORD_BITS - 1)) - 1, -1).int()


def device_rows(asks: Sequence[Ask], metadata: Metadata, cache: Tensor, scratch: Scratch | None) -> list[MassRows]:
    """The work of one step. Waits for nothing.

    ``scratch``: None where the kernels do not serve the model, which have no soft cap and no sinks.
    """
    block_size = cache.shape[2]
    single = [ask for ask in asks if ask.num_tokens == 1]
    with cache.device:  # where index tensors are made
        chunks = [ChunkRows(ask, metadata, block_size, None) for ask in asks if ask not in single]
        if not single:
            return [*chunks]
        if scratch is None:
            return [DecodeRows(single, metadata, block_size, {}), *chunks]
        return [KernelRows(single, metadata, cache, scratch), *chunks]
