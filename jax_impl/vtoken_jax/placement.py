"""On which of JAX's devices arrays are made and stay."""

from collections.abc import Callable
from typing import Any, TypeVar

import jax
import numpy as np

from vtoken.errors import SpecError

__all__ = ["checked_device", "made_on", "platform_of"]

_Made = TypeVar("_Made")


def checked_device(device: jax.Device | None) -> jax.Device | None:
    """``device`` as it is. Raises SpecError unless it is one of JAX's devices that this process drives, or None."""
    if device is None:
        return None
    if not isinstance(device, jax.Device):
        raise SpecError(f"device={device!r} is no device of JAX: give one of jax.devices(), or None for the default")
    if device.process_index != jax.process_index():
        raise SpecError(f"device={device} belongs to another process: give one of jax.local_devices()")
    return device


def made_on(device: jax.Device | None, make: Callable[[], _Made]) -> _Made:
    """What ``make`` gives, made on ``device`` and bound to it: whatever is computed from it runs there.

    None leaves it, unbound, where JAX makes arrays by default.
    """
    if device is None:
        return make()
    with jax.default_device(device):
        made: Any = jax.device_put(make(), device)  # no copy: it binds what lies there already
    kept: _Made = made
    return kept


def platform_of(device: jax.Device | None) -> str:
    """``cpu``, ``gpu`` or ``tpu``: of ``device``, or of where JAX makes arrays by default."""
    if device is None:
        (device,) = jax.device_put(np.empty(0, np.float32)).devices()
    platform: str = device.platform
    return platform
