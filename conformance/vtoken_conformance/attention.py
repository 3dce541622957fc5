"""Attention in exact enough arithmetic: SPEC A-1 to A-3 in float64, over positions and bytes alone."""

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from vtoken.executor import KVSpec
from vtoken.types import Position
from vtoken_conformance.bits import decode

__all__ = ["TOLERANCE", "Array", "attention"]

TOLERANCE = {"float32": 1e-5, "bfloat16": 2.0**-7, "float16": 2.0**-10}
"""A-4: allowed difference, as a share of the largest reference value, by storage dtype."""

Array = npt.NDArray[np.float64]


def attention(
    spec: KVSpec, kv: Mapping[Position, bytes], q: bytes, query_positions: Sequence[Position]
) -> tuple[Array, dict[Position, float]]:
    """Output ``[num_queries, num_layers, num_query_heads, head_size]`` and the mass of each live position."""
    positions = sorted(kv)
    shape = (len(query_positions), spec.num_layers, spec.num_query_heads, spec.head_size)
    queries = np.frombuffer(q, dtype=np.float32).astype(np.float64).reshape(shape)
    out, mass = np.zeros(shape), np.zeros(len(positions))
    if not positions:
        return out, {}
    visible = np.array(positions)[None, :] <= np.array(query_positions)[:, None]
    layer_bytes = spec.token_bytes // spec.num_layers
    for layer in range(spec.num_layers):
        start = layer * layer_bytes
        keys, values = _heads(spec, [kv[position][start : start + layer_bytes] for position in positions])
        logits = np.einsum("qhd,thd->qht", queries[:, layer], keys) * spec.head_size**-0.5
        weights = _softmax(logits, visible[:, None, :])
        out[:, layer] = np.einsum("qht,thd->qhd", weights, values)
        mass += weights.sum(axis=(0, 1)) / spec.num_layers
    return out, dict(zip(positions, mass.tolist(), strict=True))


def _heads(spec: KVSpec, tokens: Sequence[bytes]) -> tuple[Array, Array]:
    """One layer's keys and values ``[num_tokens, num_query_heads, head_size]``: each KV head under its query heads."""
    numbers = decode(b"".join(tokens), spec.dtype).reshape(len(tokens), 2, spec.num_kv_heads, spec.head_size)
    numbers = numbers.repeat(spec.num_query_heads // spec.num_kv_heads, axis=2)
    return numbers[:, 0], numbers[:, 1]


def _softmax(logits: Array, visible: npt.NDArray[np.bool_]) -> Array:
    """Over the last axis; a row that sees nothing gives zeros (A-2)."""
    logits = np.where(visible, logits, -np.inf)
    highest = logits.max(axis=-1, keepdims=True)
    weights = np.exp(logits - np.where(np.isfinite(highest), highest, 0.0))
    totals = weights.sum(axis=-1, keepdims=True)
    normalised: Array = np.divide(weights, totals, out=np.zeros_like(weights), where=totals > 0)
    return normalised
