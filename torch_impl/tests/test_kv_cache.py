import numpy as np
import pytest
import torch

from vtoken_torch.copy_engine import make_copy_engine
from vtoken_torch.kv_cache import UNWRITTEN_POSITION, KVCache


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_slots_that_were_never_written_hold_nan_and_no_position(make_spec, device, dtype):
    cache = KVCache(make_spec(dtype=dtype), device)
    for layer in range(2):
        assert cache.keys(layer).isnan().all()
        assert cache.values(layer).isnan().all()
    assert (cache.positions == UNWRITTEN_POSITION).all()


def test_a_token_is_laid_out_layer_by_layer_keys_before_values(make_spec, device):
    spec = make_spec()
    cache = KVCache(spec, device)
    numbers = np.arange(2 * spec.token_elements, dtype=np.float32)
    make_copy_engine(cache).write([5, 7], numbers.tobytes())
    canonical = torch.from_numpy(numbers).view(2, spec.num_layers, 2, spec.num_kv_heads, spec.head_size)
    for layer in range(spec.num_layers):
        assert torch.equal(cache.keys(layer)[[5, 7]].cpu(), canonical[:, layer, 0])
        assert torch.equal(cache.values(layer)[[5, 7]].cpu(), canonical[:, layer, 1])


@pytest.mark.parametrize(
    ("dtype", "head_size", "wide"),
    [
        ("float32", 1, torch.int32),
        ("float32", 2, torch.int64),
        ("float16", 1, torch.int16),
        ("bfloat16", 2, torch.int32),
        ("bfloat16", 4, torch.int64),
    ],
)
def test_copies_use_the_widest_integer_that_divides_a_row(make_spec, device, dtype, head_size, wide):
    spec = make_spec(dtype=dtype, head_size=head_size, num_kv_heads=1)
    cache = KVCache(spec, device)
    assert cache.wide.dtype == wide
    assert cache.wide.data_ptr() == cache.bits.data_ptr()
    assert cache.wide.shape[-1] * wide.itemsize == head_size * spec.item_bytes
