"""Decode attention in plain XLA, for any shape and device: the CPU's way, one request after the other.

A request's gathered rows then stay in the cache between the two products, where all requests at once would not fit
(8 requests of 4096 tokens: a quarter of the time on two cores). Rows are multiplied whole, a few KV heads at once: a
query holds zeros where other heads lie. That costs a few idle multiplications, and saves a copy of each head's part.
"""

from collections.abc import Iterator

import jax
import jax.numpy as jnp

from vtoken_jax.kernels.rows import live_tokens, read_narrow_rows, read_rows, token_slots

__all__ = ["decode"]

_EXACT = jax.lax.Precision.HIGHEST
_HEADS_AT_ONCE = 4

_Three = tuple[jax.Array, jax.Array, jax.Array]
_Softmax = tuple[jax.Array, jax.Array, jax.Array, jax.Array]


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

    def decode_one(row: _Three) -> _Three:
        query, row_slots, row_live = row

        def decode_live() -> _Three:
            keys, values = read_narrow_rows(k_plane, row_slots, kv_dtype), read_rows(v_plane, row_slots, kv_dtype)
            return _attend(*_as_precise(query, keys), values, row_live, scale, num_kv_heads)

        def decode_nothing() -> _Three:
            none = jnp.full((len(query), len(row_slots)), -jnp.inf)
            return jnp.zeros(query.shape), none, none[:, 0]

        decoded: _Three = jax.lax.cond(jnp.any(row_live), decode_live, decode_nothing)  # rows that pad a batch are free
        return decoded

    live = live_tokens(live_words, num_blocks, block_size)
    slots = _live_slots(token_slots(block_table, block_size), live)
    out, logits, lse = jax.lax.map(decode_one, (q, slots, live))
    return out, logits, lse


def _as_precise(query: jax.Array, keys: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Both in float32, or as they are in bfloat16: products are exact in float32, and YNNPACK reads half as much."""
    if query.dtype == keys.dtype == jnp.bfloat16:
        return query, keys
    return query.astype(jnp.float32), keys.astype(jnp.float32)


def _live_slots(slots: jax.Array, live: jax.Array) -> jax.Array:
    """``slots`` ``[batch, num_tokens]`` with that of the row's first live token in place of each dead one's.

    What dead slots hold is then neither read nor multiplied, and a weight of 0 is all that hides the row in its place.
    """
    first = jnp.take_along_axis(slots, jnp.argmax(live, axis=1)[:, None], axis=1)
    return jnp.where(live, slots, first)


def _attend(
    q: jax.Array, keys: jax.Array, values: jax.Array, live: jax.Array, scale: float, num_kv_heads: int
) -> _Three:
    """Output, logits and lse of one request with a live token.

    ``q`` is ``[num_query_heads, head_size]``, ``keys`` and ``values`` are ``[num_tokens, width]``.
    """

    def weights(heads_at_once: int) -> _Softmax:
        return _softmax(_logits(q, keys, num_kv_heads, heads_at_once) * scale, live)

    together = weights(_HEADS_AT_ONCE)
    if num_kv_heads > 1:  # a zero of the query times a live key that is not finite: NaN in heads that must not see it
        is_spoilt = jnp.any(jnp.isnan(together[2]))
        together = jax.lax.cond(is_spoilt, lambda: weights(1), lambda: together)
    logits, exps, total, lse = together
    return _outputs(exps, values, num_kv_heads) / total, logits, lse[:, 0]


def _softmax(logits: jax.Array, live: jax.Array) -> _Softmax:
    """Logits, -inf where no token lives; their exponentials over the largest; sum of these, and lse: ``[heads, 1]``."""
    logits = jnp.where(live, logits, -jnp.inf)
    top = jnp.max(logits, axis=-1, keepdims=True)
    exps = jnp.where(live, jnp.exp(logits - top), 0.0)
    total = jnp.sum(exps, axis=-1, keepdims=True)
    return logits, exps, total, top + jnp.log(total)


def _logits(q: jax.Array, keys: jax.Array, num_kv_heads: int, heads_at_once: int) -> jax.Array:
    """``[num_query_heads, num_tokens]``, without the scale."""
    precision = None if q.dtype == jnp.bfloat16 else _EXACT  # HIGHEST would widen them first
    parts = [
        jax.lax.dot_general(
            _spread(q[rows], num_heads), keys[:, columns], (((1,), (1,)), ((), ())),
            precision=precision, preferred_element_type=jnp.float32,
        )
        for num_heads, rows, columns in _parts(q.shape, num_kv_heads, heads_at_once)
    ]  # fmt: skip
    return jnp.concatenate(parts)


def _outputs(weights: jax.Array, values: jax.Array, num_kv_heads: int) -> jax.Array:
    """``[num_query_heads, head_size]``."""
    shape = len(weights), values.shape[1] // num_kv_heads
    parts = [
        _gathered(jnp.dot(weights[rows], values[:, columns], precision=_EXACT), num_heads)
        for num_heads, rows, columns in _parts(shape, num_kv_heads, _HEADS_AT_ONCE)
    ]
    return jnp.concatenate(parts)


def _parts(shape: tuple[int, ...], num_kv_heads: int, heads_at_once: int) -> Iterator[tuple[int, slice, slice]]:
    """KV heads that are multiplied at once: how many, their query heads, and their columns of a row."""
    num_query_heads, head_size = shape
    group = num_query_heads // num_kv_heads
    for first in range(0, num_kv_heads, heads_at_once):
        end = min(first + heads_at_once, num_kv_heads)
        yield end - first, slice(first * group, end * group), slice(first * head_size, end * head_size)


def _spread(q: jax.Array, num_heads: int) -> jax.Array:
    """``[heads, head_size]`` to ``[heads, num_heads * head_size]``: a query in its KV head's columns, zeros beside."""
    own = jnp.eye(num_heads, dtype=q.dtype)[:, None, :, None]
    return (q.reshape(num_heads, -1, 1, q.shape[-1]) * own).reshape(len(q), -1)


def _gathered(products: jax.Array, num_heads: int) -> jax.Array:
    """``[heads, num_heads * head_size]`` to ``[heads, head_size]``: the columns of each query's own KV head."""
    by_head = products.reshape(num_heads, -1, num_heads, products.shape[1] // num_heads)
    return jnp.concatenate([by_head[head, :, head] for head in range(num_heads)])
