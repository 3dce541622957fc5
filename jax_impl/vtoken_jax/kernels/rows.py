"""What the XLA kernels share: which slots a row of the tables names, which of them live, and attention over them.

Their references share it too, on the host, in float64, one token at a time.
"""

from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from vtoken_jax.device_tables import WORD_BITS, live_bits, words_per_block

__all__ = [
    "at_once",
    "attend",
    "live_tokens",
    "read_narrow_rows",
    "read_rows",
    "reference_attend",
    "reference_elements",
    "reference_live",
    "token_slots",
]

_Values = TypeVar("_Values")
_EXACT = jax.lax.Precision.HIGHEST


def live_tokens(live_words: jax.Array, num_blocks: jax.Array, block_size: int) -> jax.Array:
    """``[batch, max_blocks * words_per_block]`` uint32 to ``[batch, max_blocks * block_size]`` bool, table order."""
    live = live_bits(live_words, block_size)
    is_held = jnp.arange(live.shape[1]) < num_blocks[:, None] * block_size
    return live & is_held


def token_slots(block_table: jax.Array, block_size: int) -> jax.Array:
    """``[batch, max_blocks]`` int32 to ``[batch, max_blocks * block_size]`` int32."""
    slots = block_table[..., None] * block_size + jnp.arange(block_size, dtype=jnp.int32)
    return slots.reshape(len(block_table), -1)


def read_rows(plane: jax.Array, slots: jax.Array, kv_dtype: str) -> jax.Array:
    """The elements in ``slots`` ``[num_tokens]`` as float32 ``[num_tokens, num_kv_heads * head_size]``."""
    return read_narrow_rows(plane, slots, kv_dtype).astype(jnp.float32)


def read_narrow_rows(plane: jax.Array, slots: jax.Array, kv_dtype: str) -> jax.Array:
    """The elements in ``slots`` ``[num_tokens]`` as they are, ``[num_tokens, num_kv_heads * head_size]``."""
    return jax.lax.bitcast_convert_type(plane[slots], jnp.dtype(kv_dtype))


def at_once(values: _Values) -> _Values:
    """``values``, none of which is left for later. XLA would keep every layer's logits until all masses are summed."""
    barrier: Any = jax.lax.optimization_barrier
    held: _Values = barrier(values)
    return held


def attend(
    q: jax.Array, keys: jax.Array, values: jax.Array, visible: jax.Array, *, scale: float, num_kv_heads: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Attention of one request in float32; heads in turn, which takes two plain matrix products for each.

    Args:
        q: ``[num_queries, num_query_heads, head_size]``.
        keys, values: ``[num_tokens, num_kv_heads * head_size]`` float32.
        visible: ``[num_queries, num_tokens]`` bool. What it hides is never added, whatever it holds.
        scale: of the logits.
        num_kv_heads: KV heads, each shared by a group of query heads.

    Returns:
        out: like ``q``, float32; zeros where nothing is visible.
        logits: ``[num_queries, num_query_heads, num_tokens]`` float32, -inf where hidden.
        lse: ``[num_queries, num_query_heads]`` float32, the log of the sum of exp(logits).
    """
    num_queries, _, head_size = q.shape
    seen = jnp.any(visible, axis=0)[:, None]
    is_finite = jnp.isfinite(values)
    values, spoiled = jnp.where(seen & is_finite, values, 0.0), seen & ~is_finite
    groups = q.astype(jnp.float32).reshape(num_queries, num_kv_heads, -1, head_size)
    mask = visible[:, None]  # over the query heads of a group

    def attend_head(head: int) -> tuple[jax.Array, jax.Array, jax.Array]:
        part = slice(head * head_size, (head + 1) * head_size)
        logits = jnp.dot(groups[:, head].reshape(-1, head_size), keys[:, part].T, precision=_EXACT) * scale
        logits = jnp.where(mask, logits.reshape(num_queries, -1, len(keys)), -jnp.inf)
        top = jnp.max(logits, axis=-1, keepdims=True)
        weights = jnp.where(mask, jnp.exp(logits - top), 0.0)
        total = jnp.sum(weights, axis=-1, keepdims=True)
        weights = weights / jnp.where(total == 0.0, 1.0, total)
        out = jnp.dot(weights.reshape(-1, len(keys)), values[:, part], precision=_EXACT)
        return out.reshape(num_queries, -1, head_size), logits, (top + jnp.log(total))[..., 0]

    by_head = zip(*map(attend_head, range(num_kv_heads)), strict=True)
    out, logits, lse = (jnp.concatenate(parts, axis=1) for parts in by_head)
    out = jax.lax.cond(jnp.any(spoiled), _spoil, lambda out, *_: out, out, visible, spoiled)
    return out, logits, lse


def _spoil(out: jax.Array, visible: jax.Array, spoiled: jax.Array) -> jax.Array:
    """A value that is not finite makes NaN of what sees it, and of nothing else (0 * NaN would)."""
    num_queries, _, head_size = out.shape
    hits = jnp.dot(visible.astype(jnp.float32), spoiled.astype(jnp.float32)) > 0.0
    hits = hits.reshape(num_queries, -1, 1, head_size)
    return jnp.where(hits, jnp.nan, out.reshape(*hits.shape[:2], -1, head_size)).reshape(out.shape)


# -- for references --------------------------------------------------------------------------------------------------


def reference_live(live_words: npt.ArrayLike, num_blocks: int, block_size: int) -> list[int]:
    """Places in table order, ascending, of one row's live tokens."""
    words = np.asarray(live_words).reshape(-1, words_per_block(block_size)).tolist()
    places = [(block, offset) for block in range(num_blocks) for offset in range(block_size)]
    return [
        block * block_size + offset
        for block, offset in places
        if words[block][offset // WORD_BITS] >> offset % WORD_BITS & 1
    ]


def reference_elements(plane: npt.ArrayLike, kv_dtype: str) -> npt.NDArray[np.float64]:
    """A plane of bits ``[num_slots, width]`` as numbers."""
    return np.asarray(plane).view(jnp.dtype(kv_dtype)).astype(np.float64)


def reference_attend(
    query: npt.NDArray[np.float64], keys: npt.NDArray[np.float64], values: npt.NDArray[np.float64], scale: float
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Output ``[head_size]`` and softmax weights ``[n]`` of one query head over ``n`` tokens, at least one."""
    logits = keys @ query * scale
    weights = np.exp(logits - logits.max())
    weights /= weights.sum()
    return weights @ values, weights
