"""A model's matrix products alone, as each framework computes them: what a step cannot do without."""

from collections.abc import Callable
from typing import Any

__all__ = ["jax_products", "torch_products"]


def torch_products(model: Any, batch: int) -> Callable[[], object]:
    """All linear layers of a model of transformers on ``batch`` tokens, one after the other, and nothing else of it."""
    import torch

    weights = [each.weight for each in model.modules() if isinstance(each, torch.nn.Linear)]
    inputs = {
        weight.shape[1]: torch.ones(batch, weight.shape[1], dtype=weight.dtype, device=weight.device)
        for weight in weights
    }

    @torch.inference_mode()
    def run() -> float:
        total = [torch.nn.functional.linear(inputs[weight.shape[1]], weight) for weight in weights]
        return float(total[-1][0, 0])  # waits for the device

    return run


def jax_products(runner: Any, batch: int) -> Callable[[], object]:
    """The same of a ``JaxRunner``, in one compiled call: weights in tiles multiply as its steps do."""
    import jax
    import jax.numpy as jnp

    from vtoken_jax.model.load import abstract_model
    from vtoken_jax.model.tiles import product

    _, state = abstract_model(runner.config, runner.dtype)
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_flatten_with_path(state)[0]]
    weights = [
        weight
        for path, weight in zip(paths, runner.weights, strict=True)
        if weight.ndim > 1 and (runner.config.tied_embeddings or "embedding" not in path)
    ]
    inputs = [jnp.ones((batch, weight.shape[1]), weight.dtype) for weight in weights]  # one for each: see ``tiles``

    @jax.jit
    def run(weights: list[jax.Array], inputs: list[jax.Array]) -> list[jax.Array]:
        return [product(x, weight) for x, weight in zip(inputs, weights, strict=True)]

    return lambda: jax.block_until_ready(run(weights, inputs))  # type: ignore[no-untyped-call]  # jax has no types there
