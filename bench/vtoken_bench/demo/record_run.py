"""Runs the model on the prompt and records the run: prefill in chunks, then greedy decoding."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from transformers import DynamicCache

from vtoken.errors import InvariantError, SpecError
from vtoken_bench.demo.attention import IMPLEMENTATION, MassSum
from vtoken_bench.demo.recording import KEPT_ROWS, Floats, Recording, Step

__all__ = ["record_run"]

_MASS_TOLERANCE = 1e-4  # relative; float32 sums over some thousand keys


@torch.inference_mode()
def record_run(
    model: Any,
    prompt_ids: Sequence[int],
    num_tokens: int,
    chunk: int = 256,
    on_step: Callable[[int], None] = lambda _: None,
) -> Recording:
    """Records ``num_tokens`` greedily decoded tokens after the prompt.

    Args:
        model: a causal model of transformers, float32, on the CPU.
        prompt_ids: at least one token.
        num_tokens: tokens to decode; each is fed once more, so that its KV is there too. End-of-text tokens are never
            chosen: the run has this length.
        chunk: prompt tokens a forward.
        on_step: told the number of tokens that each forward wrote.
    """
    if not prompt_ids or num_tokens < 1 or chunk < 1:
        raise SpecError(
            f"{len(prompt_ids)} prompt tokens, num_tokens={num_tokens}, chunk={chunk}: give at least 1 each"
        )
    before = model.config._attn_implementation
    model.set_attn_implementation(IMPLEMENTATION)
    try:
        return _Run(model, prompt_ids, num_tokens, chunk, on_step).record()
    finally:
        model.set_attn_implementation(before)


class _Run:
    def __init__(
        self, model: Any, prompt_ids: Sequence[int], num_tokens: int, chunk: int, on_step: Callable[[int], None]
    ) -> None:
        self.model = model
        self.ids = list(prompt_ids)
        self.prompt_len = len(prompt_ids)
        self.num_tokens = num_tokens
        self.chunk = chunk
        self.on_step = on_step
        self.cache = DynamicCache(config=model.config)
        self.steps: list[Step] = []
        self.never = _end_tokens(model)

    def record(self) -> Recording:
        for start in range(0, self.prompt_len, self.chunk):
            next_id = self._forward(start, min(start + self.chunk, self.prompt_len), is_chunk=True)
        for position in range(self.prompt_len, self.prompt_len + self.num_tokens):
            self.ids.append(next_id)
            next_id = self._forward(position, position + 1, is_chunk=False)
        num_heads = self.model.config.num_attention_heads
        return Recording(tuple(self.ids), self.prompt_len, num_heads, self._read_cache(), tuple(self.steps))

    def _forward(self, start: int, end: int, is_chunk: bool) -> int:
        """Feeds positions ``[start, end)``; returns the token that the last one makes likeliest."""
        mass = MassSum()
        ids = torch.tensor([self.ids[start:end]])
        output = self.model(ids, past_key_values=self.cache, use_cache=True, logits_to_keep=1, mass=mass)
        self.steps.append(self._step(start, end, is_chunk, mass))
        self.on_step(end - start)
        logits = output.logits[0, -1]
        logits[self.never] = float("-inf")
        return int(logits.argmax())

    def _step(self, start: int, end: int, is_chunk: bool, mass: MassSum) -> Step:
        if mass.rows is None:
            raise InvariantError("A-3: the model did not call the recording attention: no mass was collected")
        config = self.model.config
        rows: Floats = (mass.rows / config.num_hidden_layers).numpy()
        error = np.abs(rows.sum(1) / config.num_attention_heads - 1).max()
        if error > _MASS_TOLERANCE:
            raise InvariantError(f"A-3: a query's mass is off its {config.num_attention_heads} heads by {error:.1e}")
        return Step(start, end, is_chunk, rows.sum(0), rows[-KEPT_ROWS:].copy())

    def _read_cache(self) -> Floats:
        """The cache's tensors as ``[num_tokens, num_layers, 2, num_kv_heads, head_size]``, copied layer by layer."""
        layers = self.cache.layers
        num_kv_heads, num_tokens, head_size = layers[0].keys.shape[1:]
        kv: Floats = np.empty((num_tokens, len(layers), 2, num_kv_heads, head_size), np.float32)
        for index, layer in enumerate(layers):
            for part, tensor in enumerate((layer.keys, layer.values)):
                kv[:, index, part] = tensor[0].transpose(0, 1).numpy()
        return kv


def _end_tokens(model: Any) -> list[int]:
    eos = model.generation_config.eos_token_id
    return [] if eos is None else [eos] if isinstance(eos, int) else list(eos)
