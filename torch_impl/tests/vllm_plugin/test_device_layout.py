"""Token moves on vLLM's cache as GPUs have it, in all its physical layouts. The kernel's reference does the copies."""

from types import SimpleNamespace

import pytest
import torch

LAYERS, BLOCKS, HEADS, BLOCK, WIDTH = 3, 5, 2, 4, 16


def caches_in(layout):
    """One cache a layer, ``[blocks, heads, block, 2 * head_size]`` by strides, in one allocation of that order."""
    sizes = [(LAYERS, BLOCKS, HEADS, BLOCK, WIDTH)[axis] for axis in layout.value]
    whole = torch.randn(sizes, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    return list(whole.permute([layout.value.index(axis) for axis in range(5)]))


def mover_of(caches, monkeypatch):
    from vtoken_torch.copy_engine.fake_device import FakeDevice
    from vtoken_torch.kernels.move import move_tokens_reference
    from vtoken_torch.vllm_plugin import device_layout

    monkeypatch.setattr(device_layout, "move_tokens", move_tokens_reference)
    return device_layout.DeviceTokenMover(caches, FakeDevice(eager={"compute"}))


@pytest.mark.parametrize("name", ["LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC"])
def test_moved_tokens_are_read_where_they_were_put_and_nothing_else_changes(name, monkeypatch):
    from vllm.v1.kv_cache_layout import KVCacheLayout

    caches = caches_in(KVCacheLayout[name])
    mover = mover_of(caches, monkeypatch)
    everything = list(range(BLOCKS * BLOCK))
    expected = mover.read(everything)
    assert torch.equal(expected[6, 1, 1, 0], caches[1][1, 0, 2, WIDTH // 2 :])  # slot 6, layer 1, V, head 0
    src, dst = [3, 17, 9], [4, 0, 12]
    mover.move(src, dst)
    expected[dst] = expected[src].clone()
    assert torch.equal(mover.read(everything), expected)
    assert mover.num_moved_tokens == 3
    assert mover.token_bytes == expected[0].numel() * 2


def test_a_pattern_overwrites_whole_tokens(monkeypatch):
    from vllm.v1.kv_cache_layout import KVCacheLayout

    mover = mover_of(caches_in(KVCacheLayout.BLNHC), monkeypatch)
    before = mover.read([7, 9])
    mover.fill([8], 0x7FC1)
    assert (mover.read([8]).view(torch.int16) == 0x7FC1).all()
    assert torch.equal(mover.read([7, 9]), before)


def test_layers_that_share_a_cache_count_once_and_caches_that_differ_are_refused():
    from vtoken.errors import InvariantError
    from vtoken_torch.vllm_plugin.device_layout import DeviceTokenMover

    cache = torch.zeros(BLOCKS, HEADS, BLOCK, WIDTH)
    shared = DeviceTokenMover.of_layers([SimpleNamespace(kv_cache=cache), SimpleNamespace(kv_cache=cache)])
    assert shared.token_bytes == HEADS * WIDTH * 4
    layers = [SimpleNamespace(kv_cache=each) for each in (cache, torch.zeros(BLOCKS, HEADS, BLOCK, 2 * WIDTH))]
    with pytest.raises(InvariantError, match="layers differ in their KV cache"):
        DeviceTokenMover.of_layers(layers)
