import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vtoken.errors import SpecError
from vtoken_torch.kernels import decode_workspace
from vtoken_torch.kernels.decode_tile import MIN_TILE
from vtoken_torch.kernels.decode_workspace import MAX_SPLITS, DecodeWorkspace

META = torch.device("meta")  # sizes without memory
NUM_MULTIPROCESSORS = 132


@pytest.fixture(scope="module", autouse=True)
def large_device():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decode_workspace, "_num_multiprocessors", lambda device: NUM_MULTIPROCESSORS)
        yield


@given(st.integers(1, 40), st.integers(1, 8), st.integers(1, 5), st.integers(1, 5000), st.none() | st.integers(1, 64))
def test_every_batch_fits(max_num_reqs, num_kv_heads, group_size, max_tokens, num_splits):
    num_query_heads = num_kv_heads * group_size
    workspace = DecodeWorkspace(
        max_num_reqs, num_query_heads, num_kv_heads, 64, max_tokens, META, num_splits=num_splits
    )
    for num_reqs in range(1, max_num_reqs + 1):
        splits = workspace.num_splits(num_reqs)
        assert 1 <= splits <= MAX_SPLITS
        assert len(workspace.parts) >= num_reqs * num_query_heads * splits
    assert len(workspace.part_lse) == len(workspace.parts)


def test_small_batches_are_split_so_that_the_device_is_full():
    workspace = DecodeWorkspace(256, 32, 8, 128, 131072, META)
    assert workspace.num_splits(1) == MAX_SPLITS
    assert 4 * NUM_MULTIPROCESSORS <= 4 * 8 * workspace.num_splits(4) < 4 * NUM_MULTIPROCESSORS + 4 * 8
    assert workspace.num_splits(256) == 1


def test_short_tables_are_not_split_below_a_tile():
    assert DecodeWorkspace(1, 8, 8, 64, 3 * MIN_TILE, META).num_splits(1) == 3
    assert DecodeWorkspace(1, 8, 8, 64, 1, META).num_splits(1) == 1


def test_logits_are_kept_on_request():
    assert DecodeWorkspace(3, 8, 2, 64, 48, META).logits is None
    logits = DecodeWorkspace(3, 8, 2, 64, 48, META, with_logits=True).logits
    assert logits.shape == (3, 8, 48)
    assert logits.dtype == torch.float32


@pytest.mark.parametrize(
    ("sizes", "num_splits", "message"),
    [
        ((0, 8, 2, 64, 48), None, "give at least 1"),
        ((3, 8, 2, 64, 0), None, "give at least 1"),
        ((3, 8, 3, 64, 48), None, "num_query_heads=8 is no multiple of num_kv_heads=3"),
        ((3, 8, 2, 64, 48), 0, "num_splits=0: give 1 to 64"),
        ((3, 8, 2, 64, 48), 65, "num_splits=65: give 1 to 64"),
    ],
)
def test_impossible_sizes_are_refused(sizes, num_splits, message):
    with pytest.raises(SpecError, match=message):
        DecodeWorkspace(*sizes, META, num_splits=num_splits)
