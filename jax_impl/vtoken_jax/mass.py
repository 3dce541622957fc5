"""Attention mass on the device, by request row and position, as a policy declares it (SPEC A-3).

Positions never change, so that moves and recycled slots do not touch it: the host says only when a row starts afresh.
One layer of ``masses`` is a running sum. With a window, layer ``p % window`` is the mass row of query p.
"""

from functools import partial

import jax
import jax.numpy as jnp

from vtoken.policies.base import MassNeed

__all__ = ["add_masses", "clear_row", "make_masses", "num_rows_kept", "query_weights", "read_masses"]


def make_masses(need: MassNeed, num_rows: int, max_positions: int) -> jax.Array:
    """``[num_rows, max(1, window), max_positions]`` float32 zeros."""
    return jnp.zeros((num_rows, max(1, need.window), max_positions), jnp.float32)


def num_rows_kept(need: MassNeed, num_queries: int) -> int:
    """Mass rows that attention over ``num_queries`` queries must give."""
    return min(need.window, num_queries) if need.window else 1


def query_weights(need: MassNeed, counts: jax.Array, num_queries: int) -> jax.Array:
    """``[n, num_rows_kept, num_queries]``: how rows of queries add up to the rows that are kept.

    ``counts`` ``[n]``: real queries, the first of each segment row. A running sum takes them all, each decayed by the
    later ones; a window takes the last ones one by one, and nothing where there are fewer.
    """
    index = jnp.arange(num_queries)
    if need.window:
        kept = _kept_queries(need, counts, num_queries)
        return (kept[..., None] == index).astype(jnp.float32)
    age = counts[:, None] - 1 - index
    weights = jnp.where(age >= 0, jnp.float32(need.decay) ** jnp.maximum(age, 0), 0.0)
    return weights[:, None]


def add_masses(
    masses: jax.Array,
    need: MassNeed,
    rows: jax.Array,
    counts: jax.Array,
    query_positions: jax.Array,
    token_positions: jax.Array,
    added: jax.Array,
) -> jax.Array:
    """Adds one segment's mass.

    Args:
        masses: as ``make_masses`` gives it.
        need: of the policy.
        rows: ``[n]`` int32, distinct; padding lies out of range.
        counts: ``[n]`` int32, real queries of each.
        query_positions: ``[n, num_queries]`` int32.
        token_positions: ``[n, num_tokens]`` int32, out of range where there is no live token.
        added: ``[n, num_rows_kept, num_tokens]`` float32, by ``query_weights``.
    """
    if need.window:
        kept = _kept_queries(need, counts, query_positions.shape[1])
        layers = jnp.take_along_axis(query_positions, jnp.maximum(kept, 0), axis=1) % need.window
        layers = jnp.where(kept >= 0, layers, need.window)
        masses = masses.at[rows[:, None], layers].set(0.0, mode="drop")
    else:
        layers = jnp.zeros((len(rows), 1), jnp.int32)
        if need.decay != 1:
            masses = masses.at[rows].multiply((jnp.float32(need.decay) ** counts)[:, None, None], mode="drop")
    places = rows[:, None, None], layers[..., None], token_positions[:, None]
    return masses.at[places].add(added, mode="drop")


@partial(jax.jit, donate_argnums=0)
def clear_row(masses: jax.Array, row: int) -> jax.Array:
    """The row's next request starts at zero."""
    return masses.at[row].set(0.0)


@partial(jax.jit, static_argnames="summed")
def read_masses(masses: jax.Array, row: int, positions: jax.Array, *, summed: bool) -> jax.Array:
    """Mass of positions ``[n]``: the sum over layers ``[n]``, or each layer ``[max(1, window), n]``."""
    found = masses[row][:, positions]
    return jnp.sum(found, axis=0) if summed else found


def _kept_queries(need: MassNeed, counts: jax.Array, num_queries: int) -> jax.Array:
    """``[n, num_rows_kept]``: indices of the last queries, oldest first; negative where there are fewer."""
    kept = num_rows_kept(need, num_queries)
    return counts[:, None] - kept + jnp.arange(kept)
