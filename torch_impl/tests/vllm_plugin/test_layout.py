"""Token moves on vLLM's packed CPU cache, for every packing that this machine's operators write."""

import pytest
import torch

BLOCK, HEADS = 32, 2


def _write(ops, caches, isa, slots, keys, values):
    for cache in caches:
        halves = cache.view(cache.shape[0], HEADS, 2 * BLOCK, -1).chunk(2, dim=2)
        ops.cpu_attn_reshape_and_cache(keys, values, *halves, torch.tensor(slots), isa)


@pytest.mark.parametrize("head_size", [32, 128, 256])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("isa", ["vec", "vec16"])
def test_a_moved_token_is_read_where_it_was_put(isa, dtype, head_size):
    from vllm import _custom_ops as ops

    from vtoken_torch.vllm_plugin.layout import TokenMover, probe_packing

    draw = torch.Generator().manual_seed(1)
    caches = [torch.zeros(4, HEADS, BLOCK, 2 * head_size, dtype=dtype) for _ in range(2)]
    slots = [33, 34, 63, 64, 100]
    keys, values = torch.randn(2, len(slots), HEADS, head_size, generator=draw).to(dtype)
    _write(ops, caches, isa, slots, keys, values)
    mover = TokenMover(caches, probe_packing(isa, dtype, BLOCK, head_size))
    expected = torch.stack([keys, values], dim=1)
    for layer in range(2):
        assert torch.equal(mover.read(slots)[:, layer], expected)
    mover.move([100, 33, 63], [40, 100, 99])  # 100 is read before it is written
    for layer in range(2):
        assert torch.equal(mover.read([40, 100, 99, 34, 64])[:, layer], expected[[4, 0, 2, 1, 3]])


def test_a_row_major_guess_would_be_wrong():
    """K lies by columns here: the packing has to be probed."""
    from vtoken_torch.vllm_plugin.layout import probe_packing

    offsets = probe_packing("vec", torch.float32, BLOCK, 32)
    assert not torch.equal(offsets[0, :32], torch.arange(32))
