"""Attention of prompt chunks over paged history, in plain XLA."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from vtoken_jax.kernels.rows import (
    at_once,
    attend,
    live_tokens,
    read_rows,
    reference_attend,
    reference_elements,
    reference_live,
    token_slots,
)

__all__ = ["paged_prefill", "reference_prefill"]


@partial(jax.jit, static_argnames=("scale", "kv_dtype", "num_kv_heads", "block_size"))
def paged_prefill(
    q: jax.Array,
    k_plane: jax.Array,
    v_plane: jax.Array,
    positions: jax.Array,
    block_table: jax.Array,
    num_blocks: jax.Array,
    live_words: jax.Array,
    query_positions: jax.Array,
    *,
    scale: float,
    kv_dtype: str,
    num_kv_heads: int,
    block_size: int,
    mass_weights: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array | None]:
    """Attention of one layer for a chunk of queries in each row, computed in float32.

    A query sees the live tokens of its row at its position or before, in whatever slots they lie; the chunk's own KV,
    positions and live bits are written first. What a query does not see never leaks, NaN included; one that sees
    nothing gives zeros and pays no mass.

    Args:
        q: ``[batch, num_queries, num_query_heads, head_size]``, any float dtype.
        k_plane, v_plane, positions: as in ``KVCache``.
        block_table, num_blocks, live_words: ``batch`` rows as in ``Tables``.
        query_positions: ``[batch, num_queries]`` int32; a negative one is padding and sees nothing.
        scale: of the logits.
        kv_dtype: whose bits the planes hold.
        num_kv_heads, block_size: of the pool.
        mass_weights: ``[batch, num_masses, num_queries]`` float32, how the queries' softmax weights add up.

    Returns:
        out: like ``q``, float32.
        mass: ``[batch, num_masses, max_blocks * block_size]`` float32 in table order, summed over query heads; None
            without ``mass_weights``.
    """
    slots = token_slots(block_table, block_size)
    live = live_tokens(live_words, num_blocks, block_size)

    def attend_one(row: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array | None]:
        queries, places, row_slots, row_live, *weights = row
        visible = row_live & (positions[row_slots] <= places[:, None])
        keys, values = (read_rows(plane, row_slots, kv_dtype) for plane in (k_plane, v_plane))
        out, logits, lse = attend(queries, keys, values, visible, scale=scale, num_kv_heads=num_kv_heads)
        if not weights:
            return out, None
        paid = jnp.sum(jnp.where(visible[:, None], jnp.exp(logits - lse[..., None]), 0.0), axis=1)
        return out, jnp.dot(weights[0], paid, precision=jax.lax.Precision.HIGHEST)

    rows = (q, query_positions, slots, live)
    attended: tuple[jax.Array, jax.Array | None]
    attended = jax.lax.map(attend_one, rows if mass_weights is None else (*rows, mass_weights))
    return at_once(attended)


# -- reference -------------------------------------------------------------------------------------------------------


def reference_prefill(
    q: npt.ArrayLike,
    k_plane: npt.ArrayLike,
    v_plane: npt.ArrayLike,
    positions: npt.ArrayLike,
    block_table: npt.ArrayLike,
    num_blocks: npt.ArrayLike,
    live_words: npt.ArrayLike,
    query_positions: npt.ArrayLike,
    *,
    scale: float,
    kv_dtype: str,
    num_kv_heads: int,
    block_size: int,
    mass_weights: npt.ArrayLike,
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Output and mass as ``paged_prefill`` gives them, on the host in float64, one query and query head at a time."""
    queries, table, places = np.asarray(q).astype(np.float64), np.asarray(block_table), np.asarray(positions)
    asking, weights = np.asarray(query_positions), np.asarray(mass_weights)
    keys, values = (reference_elements(plane, kv_dtype) for plane in (k_plane, v_plane))
    *_, num_query_heads, head_size = queries.shape
    out, mass = np.zeros(queries.shape), np.zeros((*weights.shape[:2], table.shape[1] * block_size))
    for request, (words, held) in enumerate(zip(np.asarray(live_words), np.asarray(num_blocks), strict=True)):
        live = np.array(reference_live(words, held, block_size), int)
        slots = table[request, live // block_size] * block_size + live % block_size
        for index, head in np.ndindex(queries.shape[1:3]):
            is_seen = places[slots] <= asking[request, index]
            if not is_seen.any():
                continue
            start = head // (num_query_heads // num_kv_heads) * head_size
            rows = slots[is_seen], slice(start, start + head_size)
            query = queries[request, index, head]
            out[request, index, head], paid = reference_attend(query, keys[rows], values[rows], scale)
            mass[request][:, live[is_seen]] += weights[request, :, index, None] * paid
    return out, mass
