"""What attention in plain torch reads of vLLM's CPU cache."""

import numpy as np
import torch


def test_a_packing_that_is_not_plain():
    """As AMX has one: what is read must be where the packing says."""
    from vllm_step import KernelStep

    from vtoken_torch.vllm_plugin.lazy.pieces import Packing, Pieces, Scratch, Visible

    step = KernelStep([100], [1], num_heads=2, num_kv_heads=2)
    order = torch.randperm(32 * 128, generator=torch.Generator().manual_seed(1))
    plain = torch.cat([torch.arange(32 * 64).view(64, 32).T, 32 * 64 + torch.arange(32 * 64).view(32, 64)], 1)
    scattered = torch.empty_like(step.cache).flatten(2)
    scattered[..., order] = step.cache.flatten(2)
    visible = Visible(step.table[0].numpy(), 100, np.array([3, 40]))
    found = []
    for offsets, cache in ((plain, step.cache), (order[plain], scattered.view_as(step.cache))):
        pieces = Pieces([visible], Packing(offsets), 2, 3, Scratch())
        found.append((pieces.keys(cache).clone(), pieces.values(cache)))
    assert Packing(plain).is_plain
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)
