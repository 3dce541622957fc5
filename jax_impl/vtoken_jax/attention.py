"""Attention of a request over the pool: rows and shapes around the kernel, one compiled call for each layer."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from vtoken.executor import KVSpec
from vtoken.types import cdiv
from vtoken_jax.buckets import chunks, pad
from vtoken_jax.device_tables import Tables, words_per_block
from vtoken_jax.kernels.prefill import paged_prefill
from vtoken_jax.kv_cache import KVCache

__all__ = ["attend_row"]

_QUERY_SIZES = (256, 16, 1)
_PAD_QUERY = np.iinfo(np.int32).min
_MIN_TOKENS = 256


@partial(jax.jit, static_argnames=("num_blocks", "block_size", "kv_dtype"))
def _attend_layer(
    q: jax.Array,
    k_plane: jax.Array,
    v_plane: jax.Array,
    positions: jax.Array,
    tables: Tables,
    row: int,
    query_positions: jax.Array,
    *,
    num_blocks: int,
    block_size: int,
    kv_dtype: str,
) -> tuple[jax.Array, jax.Array]:
    num_queries, _, head_size = q.shape
    out, mass = paged_prefill(
        q[None], k_plane, v_plane, positions,
        tables.block_table[row, :num_blocks][None],
        tables.num_blocks[row][None],
        tables.live_words[row, : num_blocks * words_per_block(block_size)][None],
        query_positions[None],
        scale=head_size**-0.5,
        kv_dtype=kv_dtype,
        num_kv_heads=k_plane.shape[1] // head_size,
        block_size=block_size,
        mass_weights=jnp.ones((1, 1, num_queries), jnp.float32),
    )  # fmt: skip
    return out[0], jnp.reshape(mass, -1)


def _bucket_blocks(num_blocks: int, max_blocks: int, block_size: int) -> int:
    """Blocks that a call looks at: a power of two times 256 tokens, at most the row."""
    num_tokens = max(_MIN_TOKENS, 1 << (num_blocks * block_size - 1).bit_length())
    return min(max_blocks, cdiv(num_tokens, block_size))


def attend_row(
    spec: KVSpec,
    cache: KVCache,
    tables: Tables,
    row: int,
    num_blocks: int,
    q: npt.NDArray[np.float32],
    query_positions: npt.NDArray[np.int32],
) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
    """Attention of one request in all layers.

    Args:
        spec, cache, tables: the pool and its rows; read only.
        row: the request's row, of which the first ``num_blocks`` blocks are held.
        q: ``[num_queries, num_layers, num_query_heads, head_size]``.
        query_positions: ``[num_queries]``.

    Returns:
        out: like ``q``.
        mass: ``[num_blocks * block_size]``, summed over queries and query heads, mean over layers.
    """
    width = _bucket_blocks(num_blocks, tables.block_table.shape[1], spec.block_size)
    attend = partial(_attend_layer, num_blocks=width, block_size=spec.block_size, kv_dtype=spec.dtype)
    outs, masses = [], []
    for piece, size in chunks(len(q), _QUERY_SIZES):
        queries, places = pad(q[piece], size, 0.0), pad(query_positions[piece], size, _PAD_QUERY)
        layers = [
            attend(queries[:, layer], cache.k[layer], cache.v[layer], cache.positions, tables, row, places)
            for layer in range(spec.num_layers)
        ]
        outs.append(np.stack([np.asarray(out)[: piece.stop - piece.start] for out, _ in layers], axis=1))
        masses.append(np.mean([np.asarray(mass) for _, mass in layers], axis=0, dtype=np.float64))
    mass = np.sum(masses, axis=0)[: num_blocks * spec.block_size].astype(np.float32)
    return np.concatenate(outs), mass
