"""Attention over the live tokens of one request, in plain PyTorch: gathered rows, so that dead slots are never read."""

from array import array

import torch
from torch import Tensor

from vtoken.executor import Attention
from vtoken_torch.kv_cache import KVCache

__all__ = ["attend_layer", "attend_slots"]


def attend_slots(cache: KVCache, slots: Tensor, q: Tensor, query_positions: Tensor) -> Attention:
    """Attention of queries over the tokens at ``slots``, layer by layer.

    Args:
        cache: keys are stored rotated; positions say who sees whom, wherever a token lies.
        slots: ``[num_live_tokens]`` int64, physical order.
        q: ``[num_queries, num_layers, num_query_heads, head_size]`` float32.
        query_positions: ``[num_queries]`` int32.
    """
    positions = cache.positions[slots]
    visible = positions <= query_positions.unsqueeze(1)
    out = torch.empty_like(q)
    mass = torch.zeros(len(slots), dtype=torch.float32, device=cache.device)
    for layer in range(cache.spec.num_layers):
        keys, values = (rows.index_select(0, slots).float() for rows in (cache.keys(layer), cache.values(layer)))
        out[:, layer], layer_mass = attend_layer(q[:, layer], keys, values, visible)
        mass += layer_mass
    mass /= cache.spec.num_layers
    return Attention(_floats(out), tuple(positions.tolist()), _floats(mass))


def attend_layer(q: Tensor, keys: Tensor, values: Tensor, visible: Tensor) -> tuple[Tensor, Tensor]:
    """Scaled dot-product attention of one layer with grouped query heads (GQA).

    Args:
        q: ``[num_queries, num_query_heads, head_size]`` float32.
        keys, values: ``[num_tokens, num_kv_heads, head_size]`` float32.
        visible: ``[num_queries, num_tokens]`` bool; a query that sees nothing gives zeros.

    Returns:
        The output, shaped like ``q``, and the mass ``[num_tokens]``, summed over queries and query heads.
    """
    hidden = ~visible.unsqueeze(1)  # [num_queries, 1, num_tokens]
    num_queries, _, head_size = q.shape
    grouped = q.reshape(num_queries, keys.shape[1], -1, head_size) * head_size**-0.5
    scores = torch.einsum("qhgd,thd->hqgt", grouped, keys).masked_fill_(hidden, -torch.inf)
    weights = scores.softmax(-1).masked_fill_(hidden, 0.0)  # a row without a visible token is NaN before the fill
    out = torch.einsum("hqgt,thd->qhgd", weights, values)
    return out.flatten(1, 2), weights.sum((0, 1, 2))


def _floats(values: Tensor) -> "array[float]":
    return array("f", values.cpu().numpy().tobytes())
