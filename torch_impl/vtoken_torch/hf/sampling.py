"""The next token of each row, chosen on the device."""

from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

from vtoken.fingerprint import fmix32
from vtoken.serving.protocol import SamplingParams

__all__ = ["sample"]

_MASK: Final = 0xFFFFFFFF


def sample(logits: Tensor, choices: Sequence[tuple[SamplingParams, int]]) -> list[int]:
    """Token ids for logits ``[n, vocab_size]``; each choice has the index of its draw.

    A draw depends on the row's seed and its index alone: the noise is the row's own, whatever else is in the batch.
    """
    if not choices:
        return []
    tokens = logits.argmax(-1)
    for row, (params, index) in enumerate(choices):
        if params.temperature:
            tokens[row] = _draw(logits[row].float(), params, index)
    return [int(token) for token in tokens.tolist()]


def _draw(logits: Tensor, params: SamplingParams, index: int) -> Tensor:
    """One draw from a row's distribution, ``[]`` int64: the largest of the logits plus Gumbel noise."""
    generator = torch.Generator(logits.device).manual_seed(_seed(params.seed, index))
    noise = -torch.empty_like(logits).exponential_(generator=generator).log_()
    if params.top_k and params.top_k < len(logits):
        least = logits.topk(params.top_k).values[-1]
        logits = logits.masked_fill(logits < least, -torch.inf)
    return (logits / params.temperature + noise).argmax()


def _seed(seed: int, index: int) -> int:
    return fmix32(index & _MASK ^ fmix32(seed & _MASK ^ fmix32(seed >> 32 & _MASK)))
