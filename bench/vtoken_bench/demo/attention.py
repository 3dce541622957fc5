"""Attention that adds up its own mass, as an attention function of transformers."""

from typing import Any

import torch
from transformers import AttentionInterface

__all__ = ["IMPLEMENTATION", "MassSum", "attend"]

IMPLEMENTATION = "vtoken_mass"


class MassSum:
    """Mass of one forward: ``rows`` is float32 ``[num_queries, num_keys]``, summed over query heads and layers."""

    def __init__(self) -> None:
        self.rows: torch.Tensor | None = None

    def add(self, weights: torch.Tensor) -> None:
        """One layer's attention weights, float32 ``[num_query_heads, num_queries, num_keys]``."""
        rows = weights.sum(0)
        self.rows = rows if self.rows is None else self.rows.add_(rows)


def attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float,
    mass: MassSum,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Causal attention of one sequence, one layer: no layer's weights outlive the call.

    Args:
        module: the layer's attention module; not needed.
        query: ``[1, num_query_heads, num_queries, head_size]``: the newest positions.
        key, value: ``[1, num_kv_heads, num_keys, head_size]``: all positions, RoPE applied.
        attention_mask: None, since transformers makes no mask for an attention function that it does not know.
        scaling: factor on the logits.
        mass: gets the weights; given to the model's ``forward``, which hands it through.
        kwargs: what transformers hands to every attention function.

    Returns:
        ``[1, num_queries, num_query_heads, head_size]``, and None for the weights.
    """
    num_heads, num_queries, head_size = query.shape[1:]
    num_kv_heads, num_keys = key.shape[1:3]
    logits = query[0].reshape(num_kv_heads, -1, head_size) @ key[0].transpose(1, 2) * scaling
    logits = logits.view(num_heads, num_queries, num_keys)
    if num_queries > 1:
        visible = torch.ones(num_queries, num_keys, dtype=torch.bool).tril_(num_keys - num_queries)
        logits.masked_fill_(~visible, float("-inf"))
    weights = logits.softmax(-1, dtype=torch.float32)
    mass.add(weights)
    out = weights.to(value.dtype).view(num_kv_heads, -1, num_keys) @ value[0]
    return out.view(num_heads, num_queries, head_size).transpose(0, 1)[None], None


AttentionInterface.register(IMPLEMENTATION, attend)
