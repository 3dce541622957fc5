"""A pool on the device and its twin on the host, which undergoes the same in plain order."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from vtoken.executor import KVSpec
from vtoken_torch.device_tables import DeviceTables
from vtoken_torch.kernels.decode import paged_decode, reference_decode
from vtoken_torch.kernels.decode_workspace import DecodeWorkspace
from vtoken_torch.kv_cache import KVCache

__all__ = ["TwinPool"]


class TwinPool:
    """KV cache and tables twice, with the same random KV in all slots.

    Args:
        spec: of the pool.
        max_blocks: of a request.
        device: of the first; the twin lies on the CPU.
    """

    def __init__(self, spec: KVSpec, max_blocks: int, device: str, seed: int = 0) -> None:
        self.spec, self.max_blocks = spec, max_blocks
        self.rng = np.random.default_rng(seed)
        self.cache, self.twin = (KVCache(spec, torch.device(where)) for where in (device, "cpu"))
        self.tables, self.twin_tables = (
            DeviceTables(spec, torch.device(where), max_blocks) for where in (device, "cpu")
        )
        for layer in range(spec.num_layers):
            for view in (self.twin.keys(layer), self.twin.values(layer)):
                view.copy_(torch.from_numpy(self.rng.standard_normal(view.shape)))
        self.cache.bits.copy_(self.twin.bits)
        self.workspace = DecodeWorkspace(
            spec.max_num_reqs,
            spec.num_query_heads,
            spec.num_kv_heads,
            spec.head_size,
            max_blocks * spec.block_size,
            torch.device(device),
            with_logits=True,
        )

    def set_row(self, row: int, block_ids: Sequence[int], live_words: Sequence[int]) -> None:
        """In both."""
        for tables in (self.tables, self.twin_tables):
            tables.set_row(row, block_ids, live_words)

    def new_queries(self) -> Tensor:
        """``[num_layers, max_num_reqs, num_query_heads, head_size]`` in the KV dtype, on the host."""
        spec = self.spec
        shape = (spec.num_layers, spec.max_num_reqs, spec.num_query_heads, spec.head_size)
        return torch.from_numpy(self.rng.standard_normal(shape)).to(self.twin.keys(0).dtype)

    def new_tokens(self, count: int) -> Tensor:
        """KV bits of so many tokens, ``[num_planes, count, row]``, on the host."""
        num_planes, _, row = self.twin.bits.shape
        values = torch.from_numpy(self.rng.standard_normal((num_planes, count, row)))
        return values.to(self.twin.keys(0).dtype).view(self.twin.bits.dtype)

    def decode(self, queries: Tensor, out: Tensor) -> None:
        """All layers by the kernels on the current stream; the last layer's logits and lse stay in the workspace."""
        for layer, (q, each) in enumerate(zip(queries, out, strict=True)):
            keys, values = self._blocks(self.cache, layer)
            tables = (self.tables.block_table, self.tables.num_blocks, self.tables.live_words)
            paged_decode(
                q, keys, values, *tables,
                scale=self.scale, out=each, workspace=self.workspace, logits=self.workspace.logits,
            )  # fmt: skip

    def expected(self, queries: Tensor) -> tuple[Tensor, Tensor]:
        """Outputs of all layers and mass of the last, from the twin in float64."""
        tables = (self.twin_tables.block_table, self.twin_tables.num_blocks, self.twin_tables.live_words)
        results = [
            reference_decode(q, *self._blocks(self.twin, layer), *tables, scale=self.scale, dtype=torch.float64)
            for layer, q in enumerate(queries)
        ]
        return torch.stack([out for out, _, _ in results]), results[-1][2]

    @property
    def scale(self) -> float:
        """Of the logits."""
        return float(self.spec.head_size**-0.5)

    def _blocks(self, cache: KVCache, layer: int) -> tuple[Tensor, Tensor]:
        shape = (-1, self.spec.block_size, self.spec.num_kv_heads, self.spec.head_size)
        return cache.keys(layer).view(shape), cache.values(layer).view(shape)
