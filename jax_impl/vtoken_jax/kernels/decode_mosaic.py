"""Decode attention in Mosaic GPU, without tensor cores: logits, softmax, and the weighted sum of values.

Two kernels with XLA's softmax between them. The first gives one tile of tokens of one KV head to each thread block and
writes logits; XLA masks them by the live words; the second adds up values over a part of the context. A value whose
weight is zero is dropped before it is added, whatever its bits say, so that dead slots cannot leak.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu

from vtoken.types import cdiv
from vtoken_jax import compat
from vtoken_jax.kernels.rows import live_tokens

__all__ = ["decode", "refusal"]

plgpu: Any = mosaic_gpu  # half of its functions have no types

_TILE = 64  # tokens: the rows of one warpgroup's layout
_MIN_COPY = 8  # tokens: the rows of a tile of swizzled shared memory
_PROGRAMS = 528  # four for each processor of an H100
_SUM_COLUMNS = 192  # 96 registers of each thread


def refusal(*, kv_dtype: str, head_size: int, block_size: int) -> str | None:
    """What of a shape the kernels cannot take, or None."""
    row_bytes = head_size * jnp.dtype(kv_dtype).itemsize
    if block_size % _MIN_COPY:
        return f"block_size={block_size}: it must be a multiple of {_MIN_COPY}"
    if row_bytes % 32 or head_size % 8:
        return f"head_size={head_size} in {kv_dtype}: a row's bytes must be a multiple of 32 and its elements of 8"
    if head_size > 256:
        return f"head_size={head_size}: at most 256"
    return None


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
    num_parts: int | None = None,
    sum_columns: int = _SUM_COLUMNS,
    interpret: Any = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """As ``vtoken_jax.kernels.decode.Decode`` says.

    ``num_parts``: thread blocks that share the values of a request's context. ``sum_columns``: of float32 sums that a
    warpgroup keeps in registers. ``interpret``: parameters of the GPU interpreter, on the CPU.
    """
    batch, num_query_heads, head_size = q.shape
    num_tokens = block_table.shape[1] * block_size
    num_tiles = cdiv(num_tokens, _TILE)
    padded_blocks = cdiv(num_tiles * _TILE, block_size)
    table = jnp.pad(block_table, ((0, 0), (0, padded_blocks - block_table.shape[1])))
    shape = {"kv_dtype": kv_dtype, "block_size": block_size, "num_tiles": num_tiles, "interpret": interpret}

    queries = q.astype(jnp.float32).reshape(batch, num_kv_heads, -1, head_size) * scale
    logits = _logits(queries, k_plane, table, num_blocks, **shape)
    logits = logits.reshape(batch, num_query_heads, -1)
    live = jnp.pad(live_tokens(live_words, num_blocks, block_size), ((0, 0), (0, num_tiles * _TILE - num_tokens)))
    logits = jnp.where(live[:, None], logits, -jnp.inf)
    top = jnp.max(logits, axis=-1, keepdims=True)
    weights = jnp.where(live[:, None], jnp.exp(logits - top), 0.0)
    total = jnp.sum(weights, axis=-1, keepdims=True)
    weights = (weights / jnp.where(total == 0.0, 1.0, total)).reshape(batch, num_kv_heads, -1, num_tiles * _TILE)

    parts = num_parts or max(1, min(cdiv(_PROGRAMS, batch * num_kv_heads), cdiv(num_tiles, 4)))
    group = num_query_heads // num_kv_heads
    together = max(n for n in range(1, group + 1) if group % n == 0 and (n == 1 or n * head_size <= sum_columns))
    out = _weighted_sum(
        weights, v_plane, table, num_blocks, head_size=head_size, num_parts=parts, together=together, **shape
    )
    return out.reshape(q.shape), logits[..., :num_tokens], (top + jnp.log(total))[..., 0]


def _swizzled(rows: int, columns: int, dtype: Any) -> Any:
    """Shared memory for a tile of a plane, laid out so that threads read it without bank conflicts."""
    swizzle = next(size for size in (128, 64, 32) if columns * dtype.itemsize % size == 0)
    tiling = plgpu.TilingTransform((_MIN_COPY, swizzle // dtype.itemsize))
    return plgpu.SMEM((rows, columns), dtype, transforms=(tiling, plgpu.SwizzleTransform(swizzle)))


def _copies(block_size: int) -> int:
    """Copies that fetch one tile: a tile's pieces each lie within one block."""
    return _TILE // math.gcd(block_size, _TILE)


def _fetch(
    plane: Any, table: Any, request: Any, head: Any, tile: Any, target: Any, barrier: Any, block_size: int
) -> None:
    """Starts the copies of one tile of a plane, piece by piece, from the blocks that hold it."""
    num_copies, head_size = _copies(block_size), target.shape[1]
    rows = _TILE // num_copies
    for copy in range(num_copies):
        token = tile * _TILE + copy * rows
        slot = table[request, token // block_size] * block_size + token % block_size
        source = plane.at[pl.ds(slot, rows), pl.ds(head * head_size, head_size)]
        plgpu.copy_gmem_to_smem(source, target.at[pl.ds(copy * rows, rows)], barrier)


def _elements(tile: Any, kv_dtype: str) -> jax.Array:
    """``[tile, head_size]`` float32 in registers."""
    bits = compat.mosaic_load(tile, plgpu.Layout.WGMMA)
    return lax.bitcast_convert_type(bits, jnp.dtype(kv_dtype)).astype(jnp.float32)


def _logits(
    queries: jax.Array, plane: jax.Array, table: jax.Array, num_blocks: jax.Array,
    *, kv_dtype: str, block_size: int, num_tiles: int, interpret: Any,
) -> jax.Array:  # fmt: skip
    """``[batch, num_kv_heads, group, num_tiles * tile]`` float32; undefined past a request's blocks."""
    batch, num_kv_heads, group, head_size = queries.shape

    def paged_logits(q_ref, k_ref, table_ref, num_blocks_ref, out_ref, q_tile, k_tile, out_tile, q_ready, k_ready):  # type: ignore[no-untyped-def]
        request, head, tile = (lax.axis_index(name) for name in ("request", "head", "tile"))

        @pl.when(tile * _TILE < num_blocks_ref[request] * block_size)
        def _() -> None:
            plgpu.copy_gmem_to_smem(q_ref.at[request, head], q_tile, q_ready)
            _fetch(k_ref, table_ref, request, head, tile, k_tile, k_ready, block_size)
            plgpu.barrier_wait(q_ready)
            plgpu.barrier_wait(k_ready)
            keys = _elements(k_tile, kv_dtype)
            for member in range(group):
                query = compat.mosaic_load(q_tile.at[member], plgpu.Layout.WGMMA.reduce(0))
                products = keys * lax.broadcast_in_dim(query, keys.shape, (1,))
                out_tile[member] = jnp.sum(products, axis=1)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(out_tile, out_ref.at[request, head, :, pl.ds(tile * _TILE, _TILE)])
            plgpu.wait_smem_to_gmem(0)

    logits: jax.Array = plgpu.kernel(
        paged_logits,
        out_type=compat.float32_shape(batch, num_kv_heads, group, num_tiles * _TILE),
        grid=(batch, num_kv_heads, num_tiles),
        grid_names=("request", "head", "tile"),
        scratch_types=[
            plgpu.SMEM((group, head_size), jnp.float32),
            _swizzled(_TILE, head_size, plane.dtype),
            plgpu.SMEM((group, _TILE), jnp.float32),
            plgpu.Barrier(),
            plgpu.Barrier(num_arrivals=_copies(block_size)),
        ],
        interpret=interpret,
    )(queries, plane, table, num_blocks)
    return logits


def _weighted_sum(
    weights: jax.Array, plane: jax.Array, table: jax.Array, num_blocks: jax.Array,
    *, kv_dtype: str, block_size: int, num_tiles: int, head_size: int, num_parts: int, together: int,
    interpret: Any,
) -> jax.Array:  # fmt: skip
    """``[batch, num_kv_heads, group, head_size]`` float32 of weights ``[batch, num_kv_heads, group, tokens]``.

    ``together``: query heads of a group that share one tile of values.
    """
    batch, num_kv_heads, group, _ = weights.shape

    def paged_weighted_sum(  # type: ignore[no-untyped-def]
        w_ref, v_ref, table_ref, num_blocks_ref, out_ref, w_tile, v_tile, out_tile, w_ready, v_ready
    ):
        request, head, members, part = (lax.axis_index(name) for name in ("request", "head", "members", "part"))
        held_tiles = pl.cdiv(num_blocks_ref[request] * block_size, _TILE)
        tiles_per_part = pl.cdiv(held_tiles, num_parts)

        def add_tile(tile, sums):  # type: ignore[no-untyped-def]
            source = w_ref.at[request, head, pl.ds(members * together, together), pl.ds(tile * _TILE, _TILE)]
            plgpu.copy_gmem_to_smem(source, w_tile, w_ready)
            _fetch(v_ref, table_ref, request, head, tile, v_tile, v_ready, block_size)
            plgpu.barrier_wait(w_ready)
            plgpu.barrier_wait(v_ready)
            values = _elements(v_tile, kv_dtype)
            added = []
            for member, total in enumerate(sums):
                weight = compat.mosaic_load(w_tile.at[member], plgpu.Layout.WGMMA.reduce(1))
                weight = lax.broadcast_in_dim(weight, values.shape, (0,))
                added.append(total + jnp.where(weight > 0.0, values * weight, 0.0))
            plgpu.commit_smem()  # no warp still reads the tiles when the next copies begin
            return tuple(added)

        first = part * tiles_per_part
        zeros = plgpu.layout_cast(jnp.zeros((_TILE, head_size), jnp.float32), plgpu.Layout.WGMMA)
        sums = lax.fori_loop(first, jnp.minimum(first + tiles_per_part, held_tiles), add_tile, (zeros,) * together)
        for member, total in enumerate(sums):
            out_tile[member] = jnp.sum(total, axis=0)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(out_tile, out_ref.at[part, request, head, pl.ds(members * together, together)])
        plgpu.wait_smem_to_gmem(0)

    outs: jax.Array = plgpu.kernel(
        paged_weighted_sum,
        out_type=compat.float32_shape(num_parts, batch, num_kv_heads, group, head_size),
        grid=(batch, num_kv_heads, group // together, num_parts),
        grid_names=("request", "head", "members", "part"),
        scratch_types=[
            plgpu.SMEM((together, _TILE), jnp.float32),
            _swizzled(_TILE, head_size, plane.dtype),
            plgpu.SMEM((together, head_size), jnp.float32),
            plgpu.Barrier(),
            plgpu.Barrier(num_arrivals=_copies(block_size)),
        ],
        interpret=interpret,
    )(weights, plane, table, num_blocks)
    return jnp.sum(outs, axis=0)
