"""Host numbers to a device without waiting for what runs there."""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

__all__ = ["send", "upload"]


def upload(values: Sequence[int] | Sequence[Sequence[int]] | NDArray[np.int64], device: torch.device) -> Tensor:
    """The values as int64 of their shape. ``torch.tensor`` would wait for a CUDA device."""
    return send(torch.from_numpy(np.asarray(values, dtype=np.int64)), device)


def send(host: Tensor, device: torch.device) -> Tensor:
    """A tensor in host memory, on the device. On CUDA it goes through pinned memory: from other memory copies wait."""
    if device.type == "cuda":
        host = host.pin_memory()  # PyTorch's allocator keeps it until the copy has been made
    return host.to(device, non_blocking=True)
