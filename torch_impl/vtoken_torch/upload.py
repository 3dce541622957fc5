"""Host numbers to a device without waiting for what runs there."""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

__all__ = ["upload"]


def upload(values: Sequence[int] | Sequence[Sequence[int]] | NDArray[np.int64], device: torch.device) -> Tensor:
    """The values as int64 of their shape. On CUDA they go through pinned memory: ``torch.tensor`` would wait."""
    host = torch.from_numpy(np.asarray(values, dtype=np.int64))
    if device.type == "cuda":
        host = host.pin_memory()  # PyTorch's allocator keeps it until the copy has been made
    return host.to(device, non_blocking=True)
