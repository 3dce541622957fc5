"""Attention of decoding rows by the Triton kernel: block tables and live words are read on the device, in place."""

from collections.abc import Sequence

import torch
from torch import Tensor

from vtoken.policies.base import MassNeed
from vtoken_torch.hf.mass import MassBook
from vtoken_torch.kernels.decode import paged_decode, token_mass
from vtoken_torch.kernels.decode_workspace import DecodeWorkspace
from vtoken_torch.kv_store import TorchKVStore
from vtoken_torch.upload import upload

__all__ = ["KernelSegment", "Scratch"]


class Scratch:
    """The workspace of all steps of a pool.

    Logits take memory for each token of the longest request that there may be: where mass is collected, the workspace
    is made anew, with room to spare, when a step needs a wider one.
    """

    def __init__(self, store: TorchKVStore, need: MassNeed | None) -> None:
        self._spec, self._device, self._with_logits = store.spec, store.cache.device, need is not None
        self._workspace: DecodeWorkspace | None = None

    def of(self, num_tokens: int) -> DecodeWorkspace:
        """For requests of up to ``num_tokens`` slots."""
        if self._workspace is None or self._workspace.max_tokens < num_tokens:
            self._workspace = None  # its memory first
            spec = self._spec
            self._workspace = DecodeWorkspace(
                spec.max_num_reqs,
                spec.num_query_heads,
                spec.num_kv_heads,
                spec.head_size,
                min(2 * num_tokens, spec.num_slots),
                self._device,
                with_logits=self._with_logits,
            )
        return self._workspace


class KernelSegment:
    """``Segment`` of rows that write one token each.

    Args:
        rows: of the store's tables.
        query_positions: ``[len(rows)]`` int64.
        store: tables and positions.
        scratch: of the pool; one step at a time.
        need: collects mass.
    """

    def __init__(
        self,
        rows: Sequence[int],
        query_positions: Tensor,
        store: TorchKVStore,
        scratch: Scratch,
        need: MassNeed | None,
    ) -> None:
        self.num_tokens = len(rows)
        self._query_positions = query_positions
        spec = store.spec
        self._block_size = spec.block_size
        self._layer_shape = (2, -1, spec.block_size, spec.num_kv_heads, spec.head_size)
        tables, device = store.tables, store.cache.device
        self._rows = which = upload(rows, device)
        self._num_blocks = tables.num_blocks[which]
        width = tables.block_table.shape[1] if need is None else tables.most_blocks(rows)
        self._workspace = scratch.of(width * spec.block_size)
        self._block_table = tables.block_table[which, :width]
        self._live_words = tables.live_words[which, :width]
        self._positions, self._mass = None, None
        if need is not None:
            offsets = torch.arange(self._block_size, device=device)
            slots = self._block_table.long().unsqueeze(-1) * self._block_size + offsets
            self._positions = store.cache.positions[slots.flatten(1)].clamp_(min=0)  # of dead slots: any, with mass 0
            self._mass = torch.zeros(self._positions.shape, device=device)

    def attend(self, query: Tensor, kv: Tensor, scale: float) -> Tensor:
        keys, values = kv.view(self._layer_shape)
        q = query.transpose(0, 1).contiguous()
        out = torch.empty_like(q)
        work, logits = self._workspace, None
        if self._mass is not None and work.logits is not None:
            logits = work.logits[..., : self._mass.shape[1]]
        tables = self._block_table, self._num_blocks, self._live_words
        paged_decode(q, keys, values, *tables, scale=scale, out=out, workspace=work, logits=logits)
        if self._mass is not None and logits is not None:
            token_mass(logits, work.lse, self._num_blocks, self._mass, block_size=self._block_size)
        return out

    def report(self, book: MassBook, num_layers: int) -> None:
        if self._mass is not None and self._positions is not None:
            masses = (self._mass / num_layers).unsqueeze(1)
            book.add(self._rows, self._query_positions.unsqueeze(1), self._positions, masses)
