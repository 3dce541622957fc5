"""Both executors and both pools behind one face: how to wait for them, read slots, and count bytes."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from vtoken.executor import Executor

__all__ = [
    "ReadSlots",
    "Side",
    "jax_pool_bytes",
    "jax_side",
    "memcpy",
    "read_jax",
    "read_torch",
    "torch_pool_bytes",
    "torch_side",
]

_MOST_COPIED = 1 << 28

ReadSlots: TypeAlias = Callable[[Any, Sequence[int]], bytes]
"""(store, slots) -> bits ``[len(slots), token_bytes]`` in canonical order."""


@dataclass(frozen=True, slots=True)
class Side:
    """An executor, how to wait for its device, and how many bytes its pool takes there."""

    executor: Executor
    settle: Callable[[], object]
    pool_bytes: Callable[[], int]


def jax_side() -> Side:
    """On JAX's default device."""
    import jax

    from vtoken_jax.executor import JaxExecutor

    executor = JaxExecutor()

    def settle() -> None:
        jax.block_until_ready((executor.store.cache, executor.store.tables))  # type: ignore[no-untyped-call, attr-defined]  # jax has no types there; the store is a JaxKVStore

    return Side(executor, settle, lambda: jax_pool_bytes(executor.store))


def torch_side(device: str) -> Side:
    """On a device as PyTorch names it."""
    import torch

    from vtoken_torch.executor import TorchExecutor

    executor = TorchExecutor(device)

    def settle() -> None:
        executor.store.settle()  # type: ignore[attr-defined]  # the store is a TorchKVStore
        if device == "cuda":
            torch.cuda.synchronize()

    return Side(executor, settle, lambda: torch_pool_bytes(executor.store))


def jax_pool_bytes(store: Any) -> int:
    """KV and positions of a ``JaxKVStore``."""
    return sum(plane.nbytes for plane in (*store.cache.planes, store.cache.positions))


def torch_pool_bytes(store: Any) -> int:
    """KV and positions of a ``TorchKVStore``."""
    return int(store.cache.bits.nbytes + store.cache.positions.nbytes)


def read_jax(store: Any, slots: Sequence[int]) -> bytes:
    """Bits ``[len(slots), token_bytes]`` of a ``JaxKVStore`` in canonical order."""
    import numpy as np

    from vtoken_jax.kv_cache import read_tokens

    return np.asarray(read_tokens(store.cache, np.asarray(slots, np.int32))).tobytes()


def read_torch(store: Any, slots: Sequence[int]) -> bytes:
    """The same of a ``TorchKVStore``."""
    import torch

    return bytes(store.copies.read(torch.tensor(slots, device=store.cache.device)))


def memcpy(device: str, num_bytes: int) -> Callable[[], object]:
    """Work that copies ``num_bytes`` from one place to another on a device, 256 MB at a time."""
    import torch

    size = max(1, min(num_bytes, _MOST_COPIED))
    source = torch.ones(size, dtype=torch.uint8, device=device)
    target = torch.zeros_like(source)  # touched, so that no page fault is timed
    whole, rest = divmod(num_bytes, size)

    def copy() -> None:
        for _ in range(whole):
            target.copy_(source)
        target[:rest].copy_(source[:rest])
        if device == "cuda":
            torch.cuda.synchronize()

    return copy
