"""Masses of single queries against vLLM's own kernel: with one head, mass @ V is what the kernel returns."""

from types import SimpleNamespace

import pytest
import torch

BLOCK, HEAD_SIZE = 32, 64
LENGTHS, QUERIES = (70, 5, 33, 150, 64), (1, 1, 1, 40, 33)
WINDOWS = (0, 4, 0, 0, 16)


class _Step:
    """A batch on vLLM's CPU cache, and what its kernel makes of it."""

    def __init__(self, isa="vec", dtype=torch.float32, num_heads=1, num_kv_heads=1, softcap=0.0, sinks=None):
        from vllm import _custom_ops as ops

        draw = torch.Generator().manual_seed(3)
        counts = [-(-length // BLOCK) for length in LENGTHS]
        ids = torch.randperm(sum(counts), generator=draw) + 1
        self.cache = torch.randn(sum(counts) + 1, num_kv_heads, BLOCK, 2 * HEAD_SIZE, generator=draw).to(dtype)
        table = torch.zeros(len(LENGTHS), max(counts), dtype=torch.int32)
        self.keys, self.values = [], []
        halves = self.cache.view(*self.cache.shape[:2], 2 * BLOCK, -1).chunk(2, dim=2)
        for row, (length, blocks) in enumerate(zip(LENGTHS, ids.split(counts), strict=True)):
            table[row, : len(blocks)] = blocks
            slots = (blocks[:, None] * BLOCK + torch.arange(BLOCK)).flatten()[:length]
            keys, values = torch.randn(2, length, num_kv_heads, HEAD_SIZE, generator=draw).to(dtype)
            ops.cpu_attn_reshape_and_cache(keys, values, *halves, slots, isa)
            self.keys.append(keys)
            self.values.append(values)
        starts = torch.tensor([0, *QUERIES]).cumsum(0).to(torch.int32)
        lens = torch.tensor(LENGTHS, dtype=torch.int32)
        self.metadata = SimpleNamespace(query_start_loc=starts, seq_lens=lens, block_table=table)
        self.query = torch.randn(sum(QUERIES), num_heads, HEAD_SIZE, generator=draw).to(dtype)
        self.scale, self.softcap, self.sinks = HEAD_SIZE**-0.5, softcap, sinks
        plan = ops.cpu_attn_get_scheduler_metadata(
            num_reqs=len(LENGTHS),
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=HEAD_SIZE,
            seq_lens=lens,
            dtype=dtype,
            query_start_loc=starts,
            causal=True,
            sliding_window_size=-1,
            isa=isa,
            enable_kv_split=False,
        )
        self.output = torch.zeros_like(self.query)
        ops.cpu_attention_with_kv_cache(
            query=self.query,
            key_cache=halves[0],
            value_cache=halves[1],
            output=self.output,
            query_start_loc=starts,
            seq_lens=lens,
            scale=self.scale,
            causal=True,
            alibi_slopes=None,
            sliding_window=-1,
            block_table=table,
            softcap=softcap,
            scheduler_metadata=plan,
            s_aux=sinks,
        )
        self.isa, self.dtype = isa, dtype

    def masses(self, windows):
        """Masses by row of the batch, of two equal layers."""
        from vtoken_torch.vllm_plugin.layout import probe_packing
        from vtoken_torch.vllm_plugin.mass.queries import Ask, Heads, KeyReader, rows_of

        reader = KeyReader(probe_packing(self.isa, self.dtype, BLOCK, HEAD_SIZE)[:, :HEAD_SIZE])
        starts = self.metadata.query_start_loc.tolist()
        asks = [
            Ask(str(row), row, window, starts[row], QUERIES[row], LENGTHS[row])
            for row, window in enumerate(windows)
            if window is not None
        ]
        result = {}
        for rows in rows_of(asks, self.metadata, BLOCK):
            for _ in range(2):
                rows.add(self.query, self.cache, reader, Heads(self.scale, self.softcap, self.sinks))
            result.update(rows.split(rows.masses / 2))
        return {int(req_id): masses for req_id, masses in result.items()}


@pytest.mark.parametrize(("softcap", "has_sinks"), [(0.0, False), (2.0, False), (0.0, True)])
def test_mass_weighs_the_values_as_vllms_kernel_does(softcap, has_sinks):
    step = _Step(softcap=softcap, sinks=torch.tensor([0.7]) if has_sinks else None)
    ends = step.metadata.query_start_loc.tolist()
    masses = step.masses([max(QUERIES)] * len(LENGTHS))  # a window over the whole chunk: one row for each query
    for row, (length, num_queries) in enumerate(zip(LENGTHS, QUERIES, strict=True)):
        assert masses[row].shape == (num_queries, length)
        output = step.output[ends[row] : ends[row + 1], 0]
        assert torch.allclose(masses[row] @ step.values[row][:, 0], output, atol=2e-6), f"row {row}"


@pytest.mark.parametrize("tile", [1 << 18, 100, 1])
@pytest.mark.parametrize(("isa", "dtype"), [("vec", torch.float32), ("vec16", torch.float32), ("vec", torch.bfloat16)])
def test_sums_and_windows_over_grouped_heads(monkeypatch, isa, dtype, tile):
    from vtoken_torch.vllm_plugin.mass import queries

    monkeypatch.setattr(queries, "_TILE", tile)
    step = _Step(isa, dtype, num_heads=6, num_kv_heads=2)
    masses = step.masses(WINDOWS)
    starts = step.metadata.query_start_loc.tolist()
    for row, (length, num_queries, window) in enumerate(zip(LENGTHS, QUERIES, WINDOWS, strict=True)):
        query = step.query[starts[row] : starts[row + 1]].float()
        keys = step.keys[row].float().repeat_interleave(3, dim=1)
        logits = torch.einsum("qhd,khd->hqk", query, keys) * step.scale
        hidden = torch.ones(num_queries, length, dtype=torch.bool).triu(length - num_queries + 1)
        expected = logits.masked_fill(hidden, -torch.inf).softmax(-1).sum(0)
        expected = expected[-window:] if window else expected.sum(0, keepdim=True)
        assert torch.allclose(masses[row], expected, rtol=1e-5, atol=1e-6), f"row {row}"


def test_a_row_that_nobody_asks_for_is_left_out():
    step = _Step()
    some = step.masses([None, 0, None, 0, None])
    assert sorted(some) == [1, 3]
    everyone = step.masses([0] * len(LENGTHS))
    assert all(torch.equal(some[row], everyone[row]) for row in some)


def test_keys_of_an_unknown_packing_are_gathered():
    from vtoken_torch.vllm_plugin.mass.queries import KeyReader

    offsets = torch.randperm(BLOCK * 8).view(BLOCK, 8)
    cache = torch.randn(3, 2, BLOCK, 16)
    keys = KeyReader(offsets).read(cache, torch.tensor([2, 0]))
    assert keys.shape == (2, 2, 8, BLOCK)
    assert keys[0, 1, 5, 9] == cache[2, 1].flatten()[offsets[9, 5]]
