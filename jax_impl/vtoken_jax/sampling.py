"""The next token of each row, chosen on the device. A row's draws depend on its seed and their index alone."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from vtoken.serving.protocol import SamplingParams

__all__ = ["Draws", "make_draws", "sample"]

_MASK = 0xFFFFFFFF


class Draws(NamedTuple):
    """How each of ``n`` rows chooses.

    Attributes:
        temperature: ``[n]`` float32; 0 is greedy.
        top_k: ``[n]`` int32; 0 is all.
        keys: ``[n, 2]`` uint32, the high and low halves of the seeds.
        indices: ``[n]`` int32, the index of the draw.
    """

    temperature: jax.Array
    top_k: jax.Array
    keys: jax.Array
    indices: jax.Array


def make_draws(rows: Sequence[tuple[SamplingParams, int] | None]) -> tuple[Draws | None, int]:
    """Arrays for rows of (parameters, index of the draw), and the largest ``top_k``, up to a power of two.

    None stands for a row whose token nobody wants. If all are greedy there is no ``Draws``: sorting a vocabulary and
    drawing noise for it cost more than a small model's layer.
    """
    params = [(SamplingParams(), 0) if row is None else row for row in rows]
    if not any(each.temperature for each, _ in params):
        return None, 0
    most = max(each.top_k for each, _ in params if each.temperature)
    arrays: Any = (  # jit takes NumPy's as they are
        np.asarray([each.temperature for each, _ in params], np.float32),
        np.asarray([each.top_k for each, _ in params], np.int32),
        np.asarray([(each.seed >> 32 & _MASK, each.seed & _MASK) for each, _ in params], np.uint32),
        np.asarray([draw for _, draw in params], np.int32),
    )
    return Draws(*arrays), 1 << (most - 1).bit_length() if most else 0


def sample(logits: jax.Array, draws: Draws | None, max_top_k: int) -> jax.Array:
    """Token ids ``[n]`` int32 of logits ``[n, vocab_size]`` float32; ties go to the lower id."""
    greedy = jnp.argmax(logits, axis=-1).astype(jnp.int32)
    if draws is None:
        return greedy
    kept = _keep_top(logits, draws.top_k, min(max_top_k, logits.shape[-1]))
    scaled = kept / jnp.where(draws.temperature > 0, draws.temperature, 1.0)[:, None]
    drawn = jax.vmap(_draw)(draws.keys, draws.indices, scaled).astype(jnp.int32)
    return jnp.where(draws.temperature > 0, drawn, greedy)


def _keep_top(logits: jax.Array, top_k: jax.Array, max_top_k: int) -> jax.Array:
    """Logits below the row's ``top_k``-th become -inf."""
    if not max_top_k:
        return logits
    values, _ = jax.lax.top_k(logits, max_top_k)
    last = jnp.clip(top_k, 1, max_top_k) - 1
    threshold = jnp.take_along_axis(values, last[:, None], axis=-1)
    return jnp.where((top_k[:, None] > 0) & (logits < threshold), -jnp.inf, logits)


def _draw(key: jax.Array, draw: jax.Array, logits: jax.Array) -> jax.Array:
    return jax.random.categorical(jax.random.fold_in(jax.random.wrap_key_data(key), draw), logits)
