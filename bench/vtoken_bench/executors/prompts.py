"""Prompts whose KV is computed once, by transformers, and given bit for bit to whoever decodes after them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from vtoken.errors import SpecError
from vtoken.serving.front import Frontend
from vtoken.serving.protocol import SamplingParams
from vtoken.serving.requests import Request

__all__ = ["HFDecoder", "Prompt", "Prompts", "place_in_pool"]

_MOST_TOKENS = 4096
"""Of different prompts together: more would take minutes to compute on a CPU, and have the same cost when decoding."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """Tokens, and the KV of all but the last one, ``[tokens, layers, 2, num_kv_heads, head_size]`` on the CPU."""

    token_ids: tuple[int, ...]
    kv: torch.Tensor

    def shortened(self, length: int) -> "Prompt":
        """Its first tokens and its last one, ``length`` together."""
        return Prompt((*self.token_ids[: length - 1], self.token_ids[-1]), self.kv[: length - 1])

    def in_dtype(self, dtype: torch.dtype) -> "Prompt":
        """The KV rounded to a dtype."""
        return Prompt(self.token_ids, self.kv.to(dtype))


class Prompts:
    """Random prompts of ``length`` tokens. As many as make 4,096 tokens are different; others repeat their KV.

    Two requests with the same KV differ in the last token, so that they decode different texts.
    """

    def __init__(self, length: int, vocab_size: int) -> None:
        if length < 2:
            raise SpecError(f"live={length}: give at least 2 tokens")
        self.length, self._vocab_size = length, vocab_size
        self._rng = np.random.default_rng(0)
        self._made: list[Prompt] = []

    def num_different(self, batch: int) -> int:
        """Of ``batch`` prompts."""
        return max(1, min(batch, _MOST_TOKENS // self.length))

    def take(self, model: Any, batch: int, dtype: torch.dtype) -> list[Prompt]:
        """``batch`` prompts with KV of ``model`` (transformers, float32), rounded to ``dtype``."""
        num_different = self.num_different(batch)
        while len(self._made) < num_different:
            tokens = self._rng.integers(3, self._vocab_size, self.length).tolist()
            self._made.append(Prompt(tuple(tokens), _prefill(model, tokens[:-1])))
        rounded = [prompt.in_dtype(dtype) for prompt in self._made[:num_different]]
        last = np.random.default_rng(1).permutation(self._vocab_size - 3)[:batch] + 3
        return [
            Prompt((*prompt.token_ids[:-1], int(token)), prompt.kv)
            for prompt, token in zip((rounded[at % num_different] for at in range(batch)), last, strict=True)
        ]


@torch.inference_mode()
def _prefill(model: Any, tokens: Sequence[int]) -> torch.Tensor:
    """KV of a prompt."""
    from transformers import DynamicCache

    cache = DynamicCache(config=model.config)
    before = model.config._attn_implementation
    model.set_attn_implementation("sdpa")  # eager would hold all weights of all queries
    try:
        model(input_ids=torch.tensor([tokens], device=model.device), past_key_values=cache, logits_to_keep=1)
    finally:
        model.set_attn_implementation(before)
    layers = [torch.stack((layer.keys[0], layer.values[0])) for layer in cache.layers]
    return torch.stack(layers).permute(3, 0, 1, 2, 4).contiguous().cpu()


def place_in_pool(engine: Frontend, prompts: Sequence[Prompt]) -> list[Request]:
    """Starts requests whose prompts are in the engine's pool but for their last tokens: each next step decodes."""
    sampling = SamplingParams(max_tokens=engine.max_model_len - max(len(prompt.token_ids) for prompt in prompts))
    requests = [engine.submit(prompt.token_ids, sampling) for prompt in prompts]
    engine.loop.batch.admit()
    for request, prompt in zip(requests, prompts, strict=True):
        bits = prompt.kv.view(torch.uint8).numpy()
        engine.loop.pool.append(request.req_id, len(prompt.kv), bits.reshape(-1).data)
        request.computed = len(prompt.kv)
    return requests


class HFDecoder:
    """The same through transformers' ``DynamicCache``, without ``generate`` and its checks.

    Attributes:
        tokens: ``[batch, 1]``, the next inputs.
        cache: what was computed.
    """

    def __init__(self, model: Any, prompts: Sequence[Prompt]) -> None:
        from transformers import DynamicCache

        self.model = model
        self.tokens = torch.tensor([prompt.token_ids[-1:] for prompt in prompts], device=model.device)
        self.cache = DynamicCache(config=model.config)
        for layer in range(prompts[0].kv.shape[1]):
            keys, values = (
                torch.stack([prompt.kv[:, layer, part].transpose(0, 1) for prompt in prompts]).to(
                    model.device, model.dtype
                )
                for part in (0, 1)
            )
            self.cache.update(keys, values, layer)

    @torch.inference_mode()
    def logits(self) -> torch.Tensor:
        """One step's ``[batch, vocab_size]``."""
        output = self.model(input_ids=self.tokens, past_key_values=self.cache, use_cache=True, logits_to_keep=1)
        logits: torch.Tensor = output.logits[:, -1]
        return logits

    def step(self) -> list[int]:
        """Decodes a token of each request."""
        self.tokens = self.logits().argmax(-1, keepdim=True)
        found: list[int] = self.tokens[:, 0].tolist()
        return found

    def newest_kv(self, count: int) -> torch.Tensor:
        """KV of the last ``count`` tokens, ``[batch, count, planes, elements]`` float32 on the CPU."""
        planes = [part[:, :, -count:] for layer in self.cache.layers for part in (layer.keys, layer.values)]
        return torch.stack(planes).permute(1, 3, 0, 2, 4).flatten(3).float().cpu()

    @property
    def kv_bytes(self) -> int:
        """Of the cache."""
        return sum(layer.keys.nbytes + layer.values.nbytes for layer in self.cache.layers)
