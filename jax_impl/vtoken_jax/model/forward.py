"""One packed forward over the paged pool: decode rows and prefill chunks, their KV writes, mass, and next tokens.

A step is a tuple of segments, each a matrix of tokens: ``[n, 1]`` of requests that decode, ``[n, q]`` of chunks. Matrix
products see all tokens at once; attention sees one segment after the other. A function of arrays alone: shapes and the
static arguments say what is compiled, and ``run_step`` is compiled once for each, whichever engine asks.
"""

import logging
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from vtoken.executor import DType
from vtoken.policies.base import MassNeed
from vtoken_jax.device_tables import Tables, live_bits
from vtoken_jax.kernels.decode import Implementation, paged_decode
from vtoken_jax.kernels.prefill import paged_prefill
from vtoken_jax.kv_cache import KVCache, storage_dtype
from vtoken_jax.mass import add_masses, query_weights
from vtoken_jax.model.config import ModelConfig
from vtoken_jax.model.llama import Llama, rope_tables
from vtoken_jax.model.load import abstract_model
from vtoken_jax.sampling import Draws, sample

__all__ = ["PAD_POSITION", "Segment", "run_step"]

PAD_POSITION = np.iinfo(np.int32).min
"""Position of a padded query: it sees nothing."""

_log = logging.getLogger("vtoken_jax")


class Segment(NamedTuple):
    """``n`` rows of ``q`` tokens each, padded at the end.

    Attributes:
        token_ids: ``[n, q]`` int32.
        positions: ``[n, q]`` int32; padding is ``PAD_POSITION``.
        slots: ``[n, q]`` int32, where their KV goes; padding lies out of range.
        rows: ``[n]`` int32, rows of ``Tables``; padding lies out of range.
        counts: ``[n]`` int32, real tokens of each row.
    """

    token_ids: jax.Array
    positions: jax.Array
    slots: jax.Array
    rows: jax.Array
    counts: jax.Array


@partial(
    jax.jit,
    static_argnames=("config", "dtype", "need", "num_blocks", "block_size", "max_top_k", "implementation"),
    donate_argnames=("cache", "masses"),
)
def run_step(
    weights: tuple[jax.Array, ...],
    cache: KVCache,
    masses: jax.Array | None,
    tables: Tables,
    segments: tuple[Segment, ...],
    draws: Draws | None,
    *,
    config: ModelConfig,
    dtype: DType,
    need: MassNeed | None,
    num_blocks: int,
    block_size: int,
    max_top_k: int,
    implementation: Implementation = "auto",
) -> tuple[KVCache, jax.Array | None, jax.Array]:
    """Writes the segments' KV and positions, attends over live tokens, adds mass, and chooses the next tokens.

    Args:
        weights: the leaves of the model's state.
        cache, masses: donated; ``masses`` is None where no policy asks for them.
        tables: with this step's tokens in them.
        segments: what is computed.
        draws: of all rows, segment after segment; None is greedy.
        config, dtype, need, max_top_k: model, element type of weights and pool, mass, as in ``sample``.
        num_blocks: blocks of each row that attention looks at.
        block_size: slots of a block.
        implementation: of attention at decode.

    Returns:
        cache, masses.
        tokens: ``[sum of n]`` int32, after each row's last token.
    """
    _log_compilation(segments, num_blocks * block_size, draws, max_top_k, need)  # runs while it is traced
    graph, state = abstract_model(config, dtype)
    model: Llama = nnx.merge(graph, jax.tree.unflatten(jax.tree.structure(state), weights))
    attention = _Attention(config, dtype, block_size, implementation)
    views = [_View.of(segment, tables, num_blocks, need) for segment in segments]
    token_ids, positions, slots = (_flat(segments, key) for key in ("token_ids", "positions", "slots"))
    places = cache.positions.at[slots].set(positions, mode="drop")
    x = model.embed(token_ids)
    cos, sin = rope_tables(config, positions, x.dtype)
    planes_k, planes_v = list(cache.k), list(cache.v)
    totals: list[list[jax.Array]] = [[] for _ in segments]
    for index, layer in enumerate(model.layers):
        q, k, v = layer.before(x, cos, sin)
        planes_k[index], planes_v[index] = _write(planes_k[index], slots, k), _write(planes_v[index], slots, v)
        outs = []
        for view, queries, total in zip(views, _split(q, segments), totals, strict=True):
            out, mass = attention(view, queries, planes_k[index], planes_v[index], places)
            outs.append(out.reshape(-1, *q.shape[1:]).astype(q.dtype))
            total += [] if mass is None else [mass]
        x = layer.after(x, jnp.concatenate(outs))
    if masses is not None and need is not None:
        for view, total in zip(views, totals, strict=True):
            mass = sum(total[1:], start=total[0]) / config.num_layers
            masses = add_masses(
                masses, need, view.segment.rows, view.segment.counts, view.segment.positions,
                view.token_positions(places, block_size, masses.shape[-1]), mass,
            )  # fmt: skip
    tokens = sample(model.logits(x[_last_tokens(segments)]), draws, max_top_k)
    return KVCache(tuple(planes_k), tuple(planes_v), places), masses, tokens


def _log_compilation(
    segments: tuple[Segment, ...], num_slots: int, draws: Draws | None, max_top_k: int, need: MassNeed | None
) -> None:
    """All by which two steps of one engine are compiled apart."""
    shapes = ", ".join(f"{n} x {q} tokens" for n, q in (segment.token_ids.shape for segment in segments))
    choice = "greedy" if draws is None else f"drawn of the top {max_top_k}" if max_top_k else "drawn"
    mass = "no mass" if need is None else f"mass of window {need.window}, decay {need.decay:g}"
    _log.info("compiling a step: %s over %d slots, %s, %s", shapes, num_slots, choice, mass)


class _View(NamedTuple):
    """What attention reads of one segment's rows: ``[n, num_blocks]`` of the tables, and the weights of its masses."""

    segment: Segment
    block_ids: jax.Array
    num_blocks: jax.Array
    live_words: jax.Array
    mass_weights: jax.Array | None

    @classmethod
    def of(cls, segment: Segment, tables: Tables, num_blocks: int, need: MassNeed | None) -> "_View":
        rows, width = segment.rows, tables.block_table.shape[1]
        num_words = tables.live_words.shape[1] // width * num_blocks
        is_real = segment.counts > 0
        return cls(
            segment,
            tables.block_table[rows, :num_blocks],
            jnp.where(is_real, tables.num_blocks[rows], 0),
            jnp.where(is_real[:, None], tables.live_words[rows, :num_words], 0),
            None if need is None else query_weights(need, segment.counts, segment.token_ids.shape[1]),
        )

    def token_positions(self, places: jax.Array, block_size: int, num_positions: int) -> jax.Array:
        """``[n, num_blocks * block_size]`` int32; ``num_positions``, out of range, where no token is live."""
        held = places.reshape(-1, block_size)[self.block_ids].reshape(len(self.block_ids), -1)
        return jnp.where(live_bits(self.live_words, block_size), held, num_positions)


class _Attention(NamedTuple):
    """Attention of one segment in one layer."""

    config: ModelConfig
    dtype: DType
    block_size: int
    implementation: Implementation

    def __call__(
        self, view: _View, q: jax.Array, k_plane: jax.Array, v_plane: jax.Array, places: jax.Array
    ) -> tuple[jax.Array, jax.Array | None]:
        """``q`` ``[n, queries, heads, head_size]`` to output of this shape and mass ``[n, rows kept, tokens]``."""
        tables = view.block_ids, view.num_blocks, view.live_words
        shape: dict[str, Any] = {
            "scale": self.config.head_size**-0.5,
            "kv_dtype": self.dtype,
            "num_kv_heads": self.config.num_kv_heads,
            "block_size": self.block_size,
        }
        if q.shape[1] > 1:
            positions, weights = view.segment.positions, view.mass_weights
            both: tuple[jax.Array, jax.Array | None] = paged_prefill(
                q, k_plane, v_plane, places, *tables, positions, mass_weights=weights, **shape
            )
            return both
        with_mass = view.mass_weights is not None
        out, mass = paged_decode(
            q[:, 0], k_plane, v_plane, *tables, with_mass=with_mass, implementation=self.implementation, **shape
        )
        return out[:, None], None if mass is None else mass[:, None]


def _flat(segments: tuple[Segment, ...], key: str) -> jax.Array:
    return jnp.concatenate([getattr(segment, key).ravel() for segment in segments])


def _split(tokens: jax.Array, segments: tuple[Segment, ...]) -> list[jax.Array]:
    """``[num_tokens, ...]`` to ``[n, q, ...]`` of each segment."""
    pieces, start = [], 0
    for segment in segments:
        shape = segment.token_ids.shape
        end = start + shape[0] * shape[1]
        pieces.append(tokens[start:end].reshape(*shape, *tokens.shape[1:]))
        start = end
    return pieces


def _last_tokens(segments: tuple[Segment, ...]) -> jax.Array:
    """Index of each row's last token in the flat order."""
    found, start = [], 0
    for segment in segments:
        n, q = segment.token_ids.shape
        found.append(start + jnp.arange(n) * q + jnp.maximum(segment.counts - 1, 0))
        start += n * q
    return jnp.concatenate(found)


def _write(plane: jax.Array, slots: jax.Array, rows: jax.Array) -> jax.Array:
    """Stores the bits of ``[num_tokens, heads, head_size]``."""
    bits = jax.lax.bitcast_convert_type(rows, storage_dtype(rows.dtype.itemsize))
    return plane.at[slots].set(bits.reshape(len(slots), -1), mode="drop")
