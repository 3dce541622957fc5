"""Request rows and free flags as device arrays, and the pure functions that change and read them."""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

from vtoken.executor import KVSpec
from vtoken.types import NULL_BLOCK_ID, cdiv

__all__ = [
    "WORD_BITS",
    "Row",
    "Tables",
    "live_bits",
    "make_tables",
    "read_row",
    "set_free",
    "set_row",
    "set_words",
    "words_per_block",
]

WORD_BITS = 32


class Tables(NamedTuple):
    """The layout of all requests and the free list, a pytree that is donated on every change.

    Attributes:
        block_table: ``[max_num_reqs, max_blocks]`` int32, padded by the null block.
        num_blocks: ``[max_num_reqs]`` int32.
        live_words: ``[max_num_reqs, max_blocks * words_per_block]`` uint32 in table order; bit o % 32 of a block's word
            o // 32 says that its slot o is live.
        free_flags: ``[num_blocks]`` bool.
    """

    block_table: jax.Array
    num_blocks: jax.Array
    live_words: jax.Array
    free_flags: jax.Array


class Row(NamedTuple):
    """One row of ``Tables``, with the positions in all its table slots: ``[max_blocks * block_size]`` int32."""

    block_ids: jax.Array
    num_blocks: jax.Array
    live_words: jax.Array
    positions: jax.Array


def words_per_block(block_size: int) -> int:
    """Words of 32 bits that hold one block's live bits."""
    return cdiv(block_size, WORD_BITS)


def live_bits(live_words: jax.Array, block_size: int) -> jax.Array:
    """``[..., num_blocks * words_per_block]`` uint32 to ``[..., num_blocks * block_size]`` bool, by table slot."""
    outer, num_words = live_words.shape[:-1], words_per_block(block_size)
    bits = live_words.reshape(*outer, -1, num_words, 1) >> jnp.arange(WORD_BITS, dtype=jnp.uint32) & jnp.uint32(1)
    by_block = bits.reshape(*outer, -1, num_words * WORD_BITS)[..., :block_size]
    return jnp.not_equal(by_block.reshape(*outer, -1), 0)


@partial(jax.jit, static_argnums=0)
def make_tables(spec: KVSpec) -> Tables:
    """Empty rows, each wide enough for the whole pool."""
    rows, max_blocks = spec.max_num_reqs, spec.num_blocks - 1
    return Tables(
        jnp.full((rows, max_blocks), NULL_BLOCK_ID, jnp.int32),
        jnp.zeros(rows, jnp.int32),
        jnp.zeros((rows, max_blocks * words_per_block(spec.block_size)), jnp.uint32),
        jnp.zeros(spec.num_blocks, jnp.bool_),
    )


@partial(jax.jit, donate_argnums=0)
def set_row(tables: Tables, row: int, num_blocks: int, block_ids: jax.Array, live_words: jax.Array) -> Tables:
    """Rewrites one row; ``block_ids`` and ``live_words`` are padded to the row's full width."""
    return tables._replace(
        block_table=tables.block_table.at[row].set(block_ids),
        num_blocks=tables.num_blocks.at[row].set(num_blocks),
        live_words=tables.live_words.at[row].set(live_words),
    )


@partial(jax.jit, donate_argnums=0)
def set_words(tables: Tables, row: int, indices: jax.Array, words: jax.Array) -> Tables:
    """Sets the words ``[n, words_per_block]`` of blocks ``indices`` ``[n]`` of a row; padding lies out of range."""
    num_words = words.shape[1]
    columns = indices[:, None] * num_words + jnp.arange(num_words)
    return tables._replace(live_words=tables.live_words.at[row, columns].set(words, mode="drop"))


@partial(jax.jit, donate_argnums=0)
def set_free(tables: Tables, block_ids: jax.Array, free: bool) -> Tables:
    """Flags blocks ``[n]``; padding lies out of range."""
    return tables._replace(free_flags=tables.free_flags.at[block_ids].set(free, mode="drop"))


@partial(jax.jit, static_argnames="block_size")
def read_row(tables: Tables, positions: jax.Array, row: int, *, block_size: int) -> Row:
    """One row in new arrays, so that the host never holds a view of a buffer that is donated later."""
    block_ids = tables.block_table[row]
    row_positions = positions.reshape(-1, block_size)[block_ids].ravel()
    return Row(block_ids, tables.num_blocks[row], tables.live_words[row], row_positions)
