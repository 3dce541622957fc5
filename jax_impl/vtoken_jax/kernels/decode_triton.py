"""Decode attention by Pallas' Triton lowering: one program for each request, KV head and part of the context.

A program walks its part in tiles of tokens. It reads the tile's blocks and live bits, loads the live rows of K and V
alone (what is dead is never read, so it cannot leak), and keeps a running softmax; parts are joined afterwards.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from vtoken.types import cdiv
from vtoken_jax import compat
from vtoken_jax.device_tables import WORD_BITS, words_per_block

__all__ = ["decode"]

_TILE_BYTES = 128  # of one column of a tile: 64 tokens, or 32 in float32, whose products would spill
_MIN_ROWS = 16  # of a matrix product on tensor cores
_PROGRAMS = 528  # four for each processor of an H100
_NEVER = -1e30  # a logit below all others that, unlike -inf, can be subtracted from itself


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
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """As ``vtoken_jax.kernels.decode.Decode`` says.

    ``num_parts``: programs that share a request's context; by default enough to fill a GPU. ``interpret``: on the CPU.
    """
    batch, num_query_heads, head_size = q.shape
    group = num_query_heads // num_kv_heads
    num_tokens = block_table.shape[1] * block_size
    dtype = jnp.promote_types(q.dtype, kv_dtype)
    tile_size = _TILE_BYTES // dtype.itemsize
    parts = num_parts or max(1, min(cdiv(_PROGRAMS, batch * num_kv_heads), cdiv(num_tokens, 4 * tile_size)))
    rows, columns = max(_MIN_ROWS, _power_of_two(group)), max(_MIN_ROWS, _power_of_two(head_size))
    padding = (0, 0), (0, 0), (0, rows - group), (0, columns - head_size)
    queries = jnp.pad(q.reshape(batch, num_kv_heads, group, head_size), padding)

    anywhere = pl.BlockSpec(memory_space=pl.ANY)
    part_shape = (parts, batch, num_kv_heads, rows)
    outs, tops, totals, logits = pl.pallas_call(
        partial(
            _kernel,
            scale=scale,
            kv_dtype=kv_dtype,
            block_size=block_size,
            head_size=head_size,
            group=group,
            tile_size=tile_size,
        ),
        grid=(batch, num_kv_heads, parts),
        in_specs=[pl.BlockSpec((None, None, rows, columns), lambda b, h, part: (b, h, 0, 0))] + [anywhere] * 5,
        out_specs=[
            pl.BlockSpec((None, None, None, rows, columns), lambda b, h, part: (part, b, h, 0, 0)),
            pl.BlockSpec((None, None, None, rows), lambda b, h, part: (part, b, h, 0)),
            pl.BlockSpec((None, None, None, rows), lambda b, h, part: (part, b, h, 0)),
            anywhere,
        ],
        out_shape=[
            compat.float32_shape(*part_shape, columns),
            compat.float32_shape(*part_shape),
            compat.float32_shape(*part_shape),
            compat.float32_shape(batch, num_query_heads, num_tokens),
        ],
        interpret=interpret,
        name="paged_decode_triton",
        **compat.triton_params(num_warps=4, num_stages=2),
    )(queries, k_plane, v_plane, block_table, num_blocks, live_words)
    out, lse = _join(outs, tops, totals)
    shape = (batch, num_query_heads)
    return out[:, :, :group, :head_size].reshape(*shape, head_size), logits, lse[:, :, :group].reshape(shape)


def _kernel(  # type: ignore[no-untyped-def]  # references of Pallas have no public type
    q_ref, k_ref, v_ref, table_ref, num_blocks_ref, words_ref, out_ref, top_ref, total_ref, logits_ref,
    *, scale: float, kv_dtype: str, block_size: int, head_size: int, group: int, tile_size: int,
) -> None:  # fmt: skip
    batch, head, part = (pl.program_id(axis) for axis in range(3))
    num_held = num_blocks_ref[batch]
    num_tiles = pl.cdiv(num_held * block_size, tile_size)
    tiles_per_part = pl.cdiv(num_tiles, pl.num_programs(2))
    rows, columns = q_ref.shape
    dtype = jnp.promote_types(q_ref.dtype, kv_dtype)
    q = q_ref[...].astype(dtype)
    column = jnp.arange(columns)
    query_head = head * group + jnp.arange(rows)
    is_query = jnp.arange(rows) < group
    num_words = words_per_block(block_size)

    def elements(plane_ref: Any, slots: jax.Array, live: jax.Array) -> jax.Array:
        where = plane_ref.at[slots[:, None], head * head_size + column[None, :]]
        bits = compat.triton_load(where, mask=live[:, None] & (column < head_size)[None, :], other=0)
        return jax.lax.bitcast_convert_type(bits, jnp.dtype(kv_dtype)).astype(dtype)

    def add_tile(tile, carry):  # type: ignore[no-untyped-def]
        out, top, total = carry
        token = tile * tile_size + jnp.arange(tile_size)
        block, offset = token // block_size, token % block_size
        is_held = block < num_held
        place = block * num_words + offset // WORD_BITS
        word = compat.triton_load(words_ref.at[batch, place], mask=is_held, other=0)
        live = is_held & (((word >> (offset % WORD_BITS).astype(jnp.uint32)) & jnp.uint32(1)) != 0)
        slots = compat.triton_load(table_ref.at[batch, block], mask=is_held, other=0) * block_size + offset
        logits = _dot(q, elements(k_ref, slots, live).T) * scale
        logits = jnp.where(live[None, :], logits, _NEVER)
        where = logits_ref.at[batch, query_head[:, None], token[None, :]]
        compat.triton_store(where, logits, mask=is_query[:, None] & is_held[None, :])
        new_top = jnp.maximum(top, jnp.max(logits, axis=1))
        weights = jnp.where(live[None, :], jnp.exp(logits - new_top[:, None]), 0.0)
        shrink = jnp.exp(top - new_top)
        out = out * shrink[:, None] + _dot(weights.astype(dtype), elements(v_ref, slots, live))
        return out, new_top, total * shrink + jnp.sum(weights, axis=1)

    first = part * tiles_per_part
    start = jnp.zeros((rows, columns), jnp.float32), jnp.full(rows, _NEVER, jnp.float32), jnp.zeros(rows, jnp.float32)
    end = jnp.minimum(first + tiles_per_part, num_tiles)
    out_ref[...], top_ref[...], total_ref[...] = jax.lax.fori_loop(first, end, add_tile, start)


def _dot(a: jax.Array, b: jax.Array) -> jax.Array:
    """Float32 sums; ``HIGHEST`` keeps TF32 away from float32 operands."""
    return jnp.dot(a, b, precision=jax.lax.Precision.HIGHEST, preferred_element_type=jnp.float32)


def _join(outs: jax.Array, tops: jax.Array, totals: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Parts ``[num_parts, batch, num_kv_heads, rows(, columns)]`` to outputs and lse; zeros where nothing lives."""
    top = jnp.max(tops, axis=0)
    shares = jnp.exp(tops - top)
    total = jnp.sum(totals * shares, axis=0)
    out = jnp.sum(outs * shares[..., None], axis=0) / jnp.where(total == 0.0, 1.0, total)[..., None]
    return out, top + jnp.log(total)


def _power_of_two(count: int) -> int:
    return 1 << (count - 1).bit_length()
