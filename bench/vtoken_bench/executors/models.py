"""The models of a comparison in one dtype: JAX's weights, PyTorch's under vToken, transformers' own, a reference."""

from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from vtoken.executor import DType
from vtoken.serving.front import Frontend
from vtoken_bench.executors.memory import growth, resident_bytes
from vtoken_bench.executors.products import jax_products, torch_products
from vtoken_bench.executors.sides import ReadSlots, jax_pool_bytes, read_jax, read_torch, torch_pool_bytes

__all__ = ["SIDES", "EngineSide", "Models"]

SIDES = ("jax", "torch")


@dataclass(frozen=True, slots=True)
class EngineSide:
    """How to make an engine, how to look into its pool, and its matrix products on a batch."""

    name: str
    make: Callable[..., Frontend]
    read: ReadSlots
    pool_bytes: Callable[[Any], int]
    products: Callable[[int], Callable[[], object]]


class Models:
    """One model's weights, loaded once for each side.

    Args:
        folder: of the model.
        dtype: of weights and pools.
        device: as PyTorch names it; JAX's is its default.

    Attributes:
        own: of transformers, with eager attention.
        reference: the same weights in float32; ``own`` where that is float32.
        weights_bytes: how much resident memory grew with each side's weights; empty where the system does not tell.
    """

    def __init__(self, folder: Path, dtype: DType, device: str) -> None:
        self.folder, self.dtype, self.device = folder, dtype, device
        self.weights_bytes: dict[str, int] = {}
        self.own = self._counted("hf", self._load)
        self.own.set_attn_implementation("eager")
        self.reference = self.own if dtype == "float32" else deepcopy(self.own).float()
        self._paged = self._counted("torch", self._load)
        self._runner = self._counted("jax", self._load_jax)

    @property
    def sides(self) -> tuple[EngineSide, EngineSide]:
        """JAX, PyTorch."""
        return (
            EngineSide("jax", self._make_jax, read_jax, jax_pool_bytes, partial(jax_products, self._runner)),
            EngineSide("torch", self._make_torch, read_torch, torch_pool_bytes, partial(torch_products, self.own)),
        )

    @property
    def token_bytes(self) -> int:
        """Of one token's KV in all layers."""
        spec = self._runner.config.kv_spec(block_size=1, num_blocks=2, max_num_reqs=1, dtype=self.dtype)
        return int(spec.token_bytes)

    def _make_jax(self, **sizes: Any) -> Frontend:
        from vtoken_jax.engine import JaxEngine
        from vtoken_jax.runner import JaxRunner

        return JaxEngine(JaxRunner(self._runner.config, self.dtype, self._runner.weights), **sizes)

    def _make_torch(self, **sizes: Any) -> Frontend:
        from vtoken_torch.engine import TorchEngine

        return TorchEngine(self._paged, **sizes)

    def _load(self) -> Any:
        import torch

        from vtoken_bench.models import load_model

        model, dtype = load_model(self.folder).model.to(self.device), getattr(torch, self.dtype)
        for weight in model.parameters():  # RoPE's frequencies are none: they stay in float32
            weight.data = weight.data.to(
                dtype, copy=True
            )  # or it may be the file's pages, read as far as they were used
        return model

    def _load_jax(self) -> Any:
        from vtoken_jax.runner import JaxRunner

        return JaxRunner.from_folder(self.folder, self.dtype)

    def _counted(self, name: str, load: Callable[[], Any]) -> Any:
        before = resident_bytes() if self.device == "cpu" else None
        loaded = load()
        grown = growth(before)
        if grown is not None:
            self.weights_bytes[name] = grown
        return loaded
