"""Compiled steps without weights: shapes alone, for ahead-of-time checks of models that no machine here can hold."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from vtoken.executor import DType
from vtoken.policies.base import MassNeed
from vtoken_jax.device_tables import make_tables
from vtoken_jax.kernels.decode import Implementation
from vtoken_jax.kv_cache import make_cache
from vtoken_jax.mass import make_masses
from vtoken_jax.model.config import ModelConfig
from vtoken_jax.model.forward import Segment, run_step
from vtoken_jax.model.load import abstract_model

__all__ = ["trace_step"]


def trace_step(
    config: ModelConfig,
    dtype: DType,
    shapes: tuple[tuple[int, int], ...],
    *,
    num_blocks: int,
    block_size: int = 16,
    width_blocks: int = 16,
    max_num_reqs: int = 16,
    need: MassNeed | None = None,
    implementation: Implementation = "auto",
    place: Callable[[Any], Any] = lambda arguments: arguments,
) -> Any:
    """``run_step`` traced for segments of these ``(rows, tokens)``: a ``jax.stages.Traced``; nothing is allocated.

    ``.lower().compile()`` compiles for the default device, ``.lower(lowering_platforms=("cuda",))`` lowers for another.
    ``place`` puts shapes on the device that is compiled for.
    """
    spec = config.kv_spec(dtype=dtype, block_size=block_size, num_blocks=num_blocks, max_num_reqs=max_num_reqs)
    _, state = abstract_model(config, dtype)
    masses = None
    if need is not None:
        masses = jax.eval_shape(lambda: make_masses(need, max_num_reqs, config.max_positions))
    arguments = (
        tuple(jax.tree.leaves(state)),
        jax.eval_shape(lambda: make_cache(spec)),
        masses,
        jax.eval_shape(lambda: make_tables(spec)),
        tuple(_segment(n, q) for n, q in shapes),
    )
    return run_step.trace(
        *place(arguments),
        None,
        config=config,
        dtype=dtype,
        need=need,
        num_blocks=width_blocks,
        block_size=block_size,
        max_top_k=0,
        implementation=implementation,
    )


def _segment(n: int, q: int) -> Segment:
    def ints(*shape: int) -> Any:
        return jax.eval_shape(lambda: jnp.zeros(shape, jnp.int32))

    return Segment(ints(n, q), ints(n, q), ints(n, q), ints(n), ints(n))
