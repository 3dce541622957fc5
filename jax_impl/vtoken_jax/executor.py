"""The JAX executor: the spec's bookkeeping over a ``JaxKVStore``."""

from typing import ClassVar

from vtoken.executor import KVSpec
from vtoken.paged_executor import PagedExecutor
from vtoken_jax.kv_store import JaxKVStore

__all__ = ["JaxExecutor"]


class JaxExecutor(PagedExecutor):
    """Runs KV operations on JAX's default device."""

    name: ClassVar[str] = "jax"

    def _make_store(self, spec: KVSpec) -> JaxKVStore:
        return JaxKVStore(spec)
