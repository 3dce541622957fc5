"""Decode attention in plain XLA, for any shape and device: the CPU's way, one request after the other.

A request's gathered rows then stay in the cache between the two products, where all requests at once would not fit
(8 requests of 4096 tokens: a quarter of the time on two cores).
"""

import jax

from vtoken_jax.kernels.rows import attend, live_tokens, read_rows, token_slots

__all__ = ["decode"]


def decode(
    q: jax.Array,
    k_plane: jax.Array,
    v_plane: jax.Array,
    block_table: jax.Array,
    num_blocks: jax.Array,
    live_words: jax.Array,
    *,
    scale: float,
    kv_dtype: str,
    num_kv_heads: int,
    block_size: int,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """As ``vtoken_jax.kernels.decode.Decode`` says."""

    def decode_one(row: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array, jax.Array]:
        query, slots, live = row
        keys, values = (read_rows(plane, slots, kv_dtype) for plane in (k_plane, v_plane))
        return attend(query[None], keys, values, live[None], scale=scale, num_kv_heads=num_kv_heads)

    live = live_tokens(live_words, num_blocks, block_size)
    out, logits, lse = jax.lax.map(decode_one, (q, token_slots(block_table, block_size), live))
    return out[:, 0], logits[:, 0], lse[:, 0]
