"""Nothing goes to a device in a way that waits for what runs there."""

import numpy as np
import pytest
import torch

from vtoken.types import Move
from vtoken_torch.copy_engine import IndexCopyEngine
from vtoken_torch.kv_store import TorchKVStore
from vtoken_torch.upload import send, upload


class Host:
    """A tensor in host memory that notes how it is sent."""

    def __init__(self):
        self.calls = []

    def pin_memory(self):
        self.calls.append("pinned")
        return self

    def to(self, device, non_blocking):
        self.calls.append((device.type, non_blocking))
        return self


@pytest.mark.parametrize(("device", "calls"), [("cuda", ["pinned", ("cuda", True)]), ("cpu", [("cpu", True)])])
def test_what_goes_to_cuda_is_pinned(device, calls):
    host = Host()
    send(host, torch.device(device))
    assert host.calls == calls


@pytest.mark.parametrize("values", [[3, 1], range(2), [[1, 2], [3, 4]], np.arange(3), []], ids=str)
def test_values_keep_their_shape_and_become_int64(values):
    there = upload(values, torch.device("cpu"))
    assert there.dtype == torch.int64
    assert there.tolist() == np.asarray(values).tolist()


def test_a_store_s_writes_moves_and_tables_are_sent(make_spec, monkeypatch):
    """``torch.tensor`` with a device waits for it."""
    store = TorchKVStore(make_spec(), torch.device("cpu"), IndexCopyEngine)
    with monkeypatch.context() as patch:
        patch.setattr(torch, "tensor", None)
        store.write([4, 5], [0, 1], bytes(2 * store.spec.token_bytes))
        store.move([Move(1, 5, 9)])
        store.set_row(0, [1, 2], [0b0001, 0b0010])
        store.settle()
        store.tables.flush()
    assert store.read_row(0).positions == (0, 1)
