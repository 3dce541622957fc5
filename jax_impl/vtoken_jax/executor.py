"""The JAX executor: the spec's bookkeeping over a ``JaxKVStore``."""

from typing import ClassVar

import jax

from vtoken.executor import KVSpec
from vtoken.paged_executor import PagedExecutor
from vtoken_jax.kv_store import JaxKVStore
from vtoken_jax.placement import checked_device

__all__ = ["JaxExecutor"]


class JaxExecutor(PagedExecutor):
    """Runs KV operations on one device.

    Args:
        device: one of ``jax.devices()``; None is JAX's default.

    Raises:
        SpecError: it is no device of this process.
    """

    name: ClassVar[str] = "jax"

    def __init__(self, device: jax.Device | None = None) -> None:
        self.device = checked_device(device)

    def _make_store(self, spec: KVSpec) -> JaxKVStore:
        return JaxKVStore(spec, self.device)
