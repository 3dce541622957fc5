"""One attention layer of vLLM's CPU backend with a batch in its cache, and what every query must see, by hand."""

from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from vllm import _custom_ops as ops
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl, CPUAttentionMetadata

from vtoken_torch.vllm_plugin.mass.queries import Ask

HEAD_SIZE = 64


class KernelStep:
    """Rows of ``lengths`` cached tokens, the last ``queries`` of which are the step's.

    Attributes:
        layer: what vLLM's attention implementation gets; ``layer.impl`` is one.
        metadata: vLLM's own.
        keys, values: of each row, ``[length, num_kv_heads, HEAD_SIZE]``.
        query: ``[num_tokens, num_heads, HEAD_SIZE]``.
    """

    def __init__(
        self,
        lengths: Sequence[int],
        queries: Sequence[int],
        isa: str = "vec",
        dtype: torch.dtype = torch.float32,
        block_size: int = 32,
        num_heads: int = 1,
        num_kv_heads: int = 1,
        softcap: float = 0.0,
        sinks: torch.Tensor | None = None,
        garbage: float | None = None,
    ) -> None:
        """``garbage``: what lies in slots that hold no token; None is anything."""
        draw = torch.Generator().manual_seed(3)
        self.lengths, self.queries, self.block_size, self.isa = lengths, queries, block_size, isa
        counts = [-(-length // block_size) for length in lengths]
        ids = torch.randperm(sum(counts), generator=draw) + 1
        self.cache = torch.randn(sum(counts) + 1, num_kv_heads, block_size, 2 * HEAD_SIZE, generator=draw).to(dtype)
        if garbage is not None:
            self.cache.fill_(garbage)
        self.table = torch.zeros(len(lengths), max(counts), dtype=torch.int32)
        self.keys: list[torch.Tensor] = []
        self.values: list[torch.Tensor] = []
        for row, (length, blocks) in enumerate(zip(lengths, ids.split(counts), strict=True)):
            self.table[row, : len(blocks)] = blocks
            keys, values = torch.randn(2, length, num_kv_heads, HEAD_SIZE, generator=draw).to(dtype)
            self.keys.append(keys)
            self.values.append(values)
            self.write(row, torch.arange(length), keys, values)
        self.starts = torch.tensor([0, *queries]).cumsum(0).to(torch.int32)
        self.query = torch.randn(sum(queries), num_heads, HEAD_SIZE, generator=draw).to(dtype)
        self.scale, self.softcap, self.sinks = HEAD_SIZE**-0.5, softcap, sinks
        impl = CPUAttentionBackendImpl.__new__(CPUAttentionBackendImpl)  # its own way asks for an engine's settings
        impl.__dict__ |= {"num_heads": num_heads, "num_kv_heads": num_kv_heads, "head_size": HEAD_SIZE}
        impl.__dict__ |= {"scale": self.scale, "logits_soft_cap": softcap, "sinks": sinks, "alibi_slopes": None}
        impl.__dict__ |= {"sliding_window": -1, "attn_type": "decoder", "kv_cache_dtype": "auto"}
        self.layer = SimpleNamespace(impl=impl, isa=isa, _k_scale_float=1.0, _v_scale_float=1.0, kv_cache=self.cache)
        lens = torch.tensor(lengths, dtype=torch.int32)
        plan = ops.cpu_attn_get_scheduler_metadata(
            num_reqs=len(lengths),
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=HEAD_SIZE,
            seq_lens=lens,
            dtype=dtype,
            query_start_loc=self.starts,
            causal=True,
            sliding_window_size=-1,
            isa=isa,
            enable_kv_split=False,
        )
        sizes = sum(queries), max(queries), self.starts, max(lengths), lens, self.table
        self.metadata = CPUAttentionMetadata(*sizes, torch.empty(0), plan)

    def write(self, row: int, slots: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Puts KV into slots (in table order) of a row."""
        halves = self.cache.view(*self.cache.shape[:2], 2 * self.block_size, -1).chunk(2, dim=2)
        where = self.table[row, slots // self.block_size] * self.block_size + slots % self.block_size
        ops.cpu_attn_reshape_and_cache(keys, values, *halves, where.long(), self.isa)

    def ask(self, row: int, window: int) -> Ask:
        """For the mass of a row's queries."""
        return Ask(str(row), row, window, int(self.starts[row]), self.queries[row], self.lengths[row])

    def forward(self) -> torch.Tensor:
        """What the layer's implementation says: ``[num_tokens, num_heads, HEAD_SIZE]``."""
        output = torch.full_like(self.query, 7.0)
        nothing: Any = None
        self.layer.impl.forward(self.layer, self.query, nothing, nothing, self.cache, self.metadata, output=output)
        return output

    def weights(self, row: int, dead: Mapping[int, torch.Tensor]) -> torch.Tensor:
        """By hand, float64 ``[num_heads, queries of the row, length]``. ``dead``: dead slots by row."""
        length, num_queries = self.lengths[row], self.queries[row]
        query = self.query[self.starts[row] : self.starts[row + 1]].double()
        keys = self.keys[row].double().repeat_interleave(query.shape[1] // self.keys[row].shape[1], dim=1)
        logits = torch.einsum("qhd,khd->hqk", query, keys) * self.scale
        if self.softcap:
            logits = torch.tanh(logits / self.softcap) * self.softcap
        hidden = torch.ones(num_queries, length, dtype=torch.bool).triu(length - num_queries + 1)
        hidden[:, dead.get(row, torch.tensor([], dtype=torch.int64))] = True
        logits.masked_fill_(hidden, -torch.inf)
        if self.sinks is None:
            return logits.softmax(-1)
        column = self.sinks.double()[:, None, None].expand(-1, num_queries, 1)
        return torch.cat([logits, column], -1).softmax(-1)[..., :-1]

    def attention(self, dead: Mapping[int, torch.Tensor]) -> torch.Tensor:
        """By hand: float64, as ``forward``."""
        found = []
        for row, values in enumerate(self.values):
            weights = self.weights(row, dead)
            grouped = values.double().repeat_interleave(len(weights) // values.shape[1], dim=1)
            found.append(torch.einsum("hqk,khd->qhd", weights, grouped))
        return torch.cat(found)
