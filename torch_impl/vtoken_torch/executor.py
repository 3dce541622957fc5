"""The PyTorch executor: the spec's bookkeeping over PyTorch arrays."""

from typing import ClassVar

import torch

from vtoken.errors import SpecError
from vtoken.executor import KVSpec
from vtoken.paged_executor import PagedExecutor
from vtoken.plugins import first_line
from vtoken_torch.kv_store import TorchKVStore

__all__ = ["TorchExecutor"]


class TorchExecutor(PagedExecutor):
    """Runs KV operations with PyTorch.

    Args:
        device: where the arrays live, as PyTorch names it ("cpu", "cuda", "cuda:1").

    Raises:
        SpecError: PyTorch cannot use this device here.
    """

    name: ClassVar[str] = "torch"

    def __init__(self, device: str | torch.device = "cpu") -> None:
        try:
            self.device = torch.empty(0, device=device).device
        except (AssertionError, NotImplementedError, RuntimeError) as error:
            raise SpecError(f"device={str(device)!r}: {first_line(error)}; 'cpu' always works") from error

    def _make_store(self, spec: KVSpec) -> TorchKVStore:
        return TorchKVStore(spec, self.device)
