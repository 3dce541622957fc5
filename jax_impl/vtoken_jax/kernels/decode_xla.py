"""Attention over one request's blocks in plain XLA: right everywhere, and the reference of faster kernels."""

import jax
import jax.numpy as jnp

from vtoken_jax.device_tables import WORD_BITS, words_per_block

__all__ = ["paged_attention"]


def paged_attention(
    q: jax.Array,
    k_plane: jax.Array,
    v_plane: jax.Array,
    positions: jax.Array,
    block_ids: jax.Array,
    live_words: jax.Array,
    query_positions: jax.Array,
    *,
    block_size: int,
    kv_dtype: str,
) -> tuple[jax.Array, jax.Array]:
    """Masked attention of one layer, computed in float32; scale ``head_size ** -0.5``.

    A query sees the live tokens at its position or before, in whatever slots they lie. What it does not see never
    leaks, NaN included; a query that sees nothing gives zeros and pays no mass.

    Args:
        q: ``[num_queries, num_query_heads, head_size]`` float32.
        k_plane, v_plane: ``[num_slots, num_kv_heads * head_size]``, bits of ``kv_dtype`` as unsigned integers.
        positions: ``[num_slots]`` int32.
        block_ids: ``[num_blocks]`` int32; padding is the null block, with no live bit.
        live_words: ``[num_blocks * words_per_block]`` uint32, as in ``Tables``.
        query_positions: ``[num_queries]`` int32; a negative one is padding and sees nothing.

    Returns:
        out: ``[num_queries, num_query_heads, head_size]`` float32.
        mass: ``[num_blocks * block_size]`` float32, summed over queries and query heads.
    """
    num_queries, num_query_heads, head_size = q.shape
    num_kv_heads = k_plane.shape[1] // head_size
    live = _live_bits(live_words, len(block_ids), block_size)

    def rows(plane: jax.Array) -> jax.Array:
        bits = plane.reshape(-1, block_size, num_kv_heads, head_size)[block_ids]
        elements = jax.lax.bitcast_convert_type(bits, jnp.dtype(kv_dtype)).astype(jnp.float32)
        return jnp.where(live[:, None, None], elements.reshape(-1, num_kv_heads, head_size), 0.0)

    keys, values = rows(k_plane), rows(v_plane)
    token_positions = positions.reshape(-1, block_size)[block_ids].ravel()

    def attend_one(query: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        vector, position = query
        visible = live & (token_positions <= position)
        return _attend(vector.reshape(num_kv_heads, -1, head_size), keys, values, visible)

    # One query after the other: each hides other values, and [num_queries, num_slots] copies of V would be large.
    out, mass = jax.lax.map(attend_one, (q, query_positions))
    return out.reshape(num_queries, num_query_heads, head_size), jnp.sum(mass, axis=0)


def _live_bits(live_words: jax.Array, num_blocks: int, block_size: int) -> jax.Array:
    """``[num_blocks * block_size]`` bool."""
    words = live_words.reshape(num_blocks, words_per_block(block_size), 1)
    bits = (words >> jnp.arange(WORD_BITS, dtype=jnp.uint32)) & jnp.uint32(1)
    return jnp.not_equal(bits.reshape(num_blocks, -1)[:, :block_size].ravel(), 0)


def _attend(q: jax.Array, keys: jax.Array, values: jax.Array, visible: jax.Array) -> tuple[jax.Array, jax.Array]:
    """One query ``[num_kv_heads, group, head_size]`` over ``[num_tokens, num_kv_heads, head_size]``; out and mass."""
    exact = jax.lax.Precision.HIGHEST
    logits = jnp.einsum("hgd,thd->hgt", q, keys, precision=exact) * q.shape[-1] ** -0.5
    top = jnp.max(logits, axis=-1, keepdims=True, where=visible, initial=-jnp.inf)
    weights = jnp.where(visible, jnp.exp(logits - top), 0.0)
    total = jnp.sum(weights, axis=-1, keepdims=True)
    weights = weights / jnp.where(total > 0.0, total, 1.0)
    out = jnp.einsum("hgt,thd->hgd", weights, jnp.where(visible[:, None, None], values, 0.0), precision=exact)
    return out, jnp.sum(weights, axis=(0, 1))
