"""Which tokens a ranked policy gives up, chosen where the masses lie: only the victims come to the host."""

from functools import partial
from typing import Literal

import jax
import jax.numpy as jnp

from vtoken_jax.device_tables import Tables, live_bits

__all__ = ["listed_mask", "live_mask", "lowest"]


@partial(jax.jit, static_argnames=("block_size", "num_blocks", "num_positions"))
def live_mask(
    tables: Tables, positions: jax.Array, row: int, *, block_size: int, num_blocks: int, num_positions: int
) -> jax.Array:
    """``[num_positions]`` bool: the live tokens in the first ``num_blocks`` blocks of a row, by position."""
    num_words = tables.live_words.shape[1] // tables.block_table.shape[1] * num_blocks
    live = live_bits(tables.live_words[row, :num_words], block_size)
    held = positions.reshape(-1, block_size)[tables.block_table[row, :num_blocks]].ravel()
    return jnp.zeros(num_positions, bool).at[jnp.where(live, held, num_positions)].set(True, mode="drop")


@partial(jax.jit, static_argnames="num_positions")
def listed_mask(positions: jax.Array, *, num_positions: int) -> jax.Array:
    """``[num_positions]`` bool of positions ``[n]``; padding lies out of range."""
    return jnp.zeros(num_positions, bool).at[positions].set(True, mode="drop")


@partial(jax.jit, static_argnames=("score", "smooth", "count"))
def lowest(
    masses: jax.Array,
    row: int,
    candidates: jax.Array,
    queries: jax.Array,
    end: int,
    spans: jax.Array,
    *,
    score: Literal["mass", "above_mean"],
    smooth: int,
    count: int,
) -> tuple[jax.Array, jax.Array]:
    """The candidates with the lowest scores; ties go to the lower position.

    Args:
        masses, row: as in ``vtoken_jax.mass``.
        candidates: ``[num_positions]`` bool.
        queries: position of the query of each layer of masses; -1 where there is none.
        end: positions from here on have no mass yet and are not chosen.
        spans: ``[n, 2]`` int32: positions in ``[low, high)`` of one of them may be chosen.
        score: the mass, or in how many layers a token lies above the mean of the candidates that the query saw.
        smooth: scores are averaged over candidates at most ``smooth // 2`` positions away.
        count: how many.

    Returns:
        chosen: ``[count]`` int32 positions, lowest score first.
        is_chosen: ``[count]`` bool: false where fewer may be chosen.
    """
    place = jnp.arange(len(candidates))
    known = candidates & (place < end)
    layers = jax.lax.dynamic_index_in_dim(masses, row, keepdims=False)[:, : len(candidates)]
    scores = jnp.sum(layers, axis=0) if score == "mass" else _times_above_mean(layers, candidates, queries)
    known &= ~jnp.isnan(scores)
    scores = _averaged(jnp.where(known, scores, 0.0), known, smooth)
    allowed = jnp.any((place >= spans[:, :1]) & (place < spans[:, 1:]), axis=0)
    negated, chosen = jax.lax.top_k(jnp.where(known & allowed, -scores, -jnp.inf), min(count, len(candidates)))
    return chosen, negated > -jnp.inf


def _times_above_mean(layers: jax.Array, candidates: jax.Array, queries: jax.Array) -> jax.Array:
    seen = candidates & (jnp.arange(len(candidates)) <= queries[:, None])
    total = jnp.sum(jnp.where(seen, layers, 0.0), axis=1, keepdims=True)
    mean = total / jnp.maximum(jnp.sum(seen, axis=1, keepdims=True), 1)
    return jnp.sum(seen & (layers > mean), axis=0).astype(jnp.float32)


def _averaged(scores: jax.Array, known: jax.Array, smooth: int) -> jax.Array:
    if smooth == 1:
        return scores
    half, ones = smooth // 2, jnp.ones(smooth, jnp.float32)
    totals, counts = (
        jnp.convolve(values, ones, mode="full", precision="highest")[half : half + len(scores)]
        for values in (scores, known.astype(jnp.float32))
    )
    return totals / jnp.maximum(counts, 1.0)
