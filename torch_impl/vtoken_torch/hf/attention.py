"""The attention function that transformers calls in every layer, under vToken's own name."""

from typing import Any, Final, Protocol

from torch import Tensor
from transformers import AttentionInterface

from vtoken.errors import SpecError

__all__ = ["NAME", "LayerAttention", "paged_attention"]

NAME: Final = "vtoken"
"""In transformers' AttentionInterface. It has no mask function of this name, so that transformers makes no mask."""


class LayerAttention(Protocol):
    """What a step passes through the model's forward, as the keyword ``vtoken``."""

    def attend(self, layer: int, query: Tensor, value: Tensor, scale: float, extras: dict[str, Any]) -> Tensor:
        """Attention of one layer, whose new KV lies in the pool.

        Args:
            layer: index of the layer.
            query: ``[1, num_query_heads, num_tokens, head_size]``, or ``[num_tokens, num_query_heads, 1, head_size]``,
                as the model's inputs are; rotated.
            value: the step's own, likewise of ``num_kv_heads``.
            scale: of the logits.
            extras: what else the model hands to its attention function.

        Returns:
            ``[1, num_tokens, num_query_heads, head_size]`` or ``[num_tokens, 1, num_query_heads, head_size]``.
        """
        ...


def paged_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    vtoken: LayerAttention | None = None,
    **extras: Any,
) -> tuple[Tensor, None]:
    """transformers' interface: what ``LayerAttention.attend`` gives, and None for the weights."""
    if vtoken is None:
        raise SpecError(
            f"attention implementation {NAME!r} runs within vToken's engine only: call "
            "model.set_attn_implementation('sdpa') to use the model without it"
        )
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    return vtoken.attend(module.layer_idx, query, value, scale, extras), None


AttentionInterface.register(NAME, paged_attention)
