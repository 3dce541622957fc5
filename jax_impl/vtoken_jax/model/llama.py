"""The decoder as flax NNX modules: weights and what each layer computes, attention apart.

Matrices lie as in torch, ``[out, in]``, or in tiles (``vtoken_jax.model.tiles``); q, k and v share one, so do gate and
up, since fewer and larger products cost less. Attention, positions and the KV pool are the forward's
(``vtoken_jax.model.forward``).
"""

import math

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from vtoken_jax.model.config import ModelConfig, RopeScaling
from vtoken_jax.model.tiles import product, row

__all__ = ["Layer", "Llama", "rope_tables"]


class Linear(nnx.Module):
    """``x @ weight.T + bias``; weight ``[out, in]``."""

    def __init__(self, num_in: int, num_out: int, bias: bool, dtype: jnp.dtype) -> None:
        self.weight = nnx.Param(jnp.zeros((num_out, num_in), dtype))
        self.bias = nnx.Param(jnp.zeros(num_out, dtype)) if bias else None

    def __call__(self, x: jax.Array) -> jax.Array:
        """``[num_tokens, in]`` to ``[num_tokens, out]``."""
        y = product(x, self.weight[...])
        return y if self.bias is None else y + self.bias[...]


class RMSNorm(nnx.Module):
    """Root mean square norm, computed in float32."""

    def __init__(self, size: int, eps: float, dtype: jnp.dtype) -> None:
        self.weight = nnx.Param(jnp.ones(size, dtype))
        self.eps = eps

    def __call__(self, x: jax.Array) -> jax.Array:
        """``[num_tokens, size]``, same dtype."""
        wide = x.astype(jnp.float32)
        wide = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + self.eps)
        normed: jax.Array = self.weight[...] * wide.astype(x.dtype)
        return normed


class Layer(nnx.Module):
    """One decoder layer in two halves, around attention."""

    def __init__(self, config: ModelConfig, dtype: jnp.dtype) -> None:
        c, width = config, config.num_query_heads * config.head_size
        self.num_query_heads, self.num_kv_heads, self.head_size = c.num_query_heads, c.num_kv_heads, c.head_size
        self.input_norm = RMSNorm(c.hidden_size, c.rms_norm_eps, dtype)
        self.qkv = Linear(c.hidden_size, width + 2 * c.num_kv_heads * c.head_size, c.qkv_bias, dtype)
        self.output = Linear(width, c.hidden_size, c.output_bias, dtype)
        self.post_norm = RMSNorm(c.hidden_size, c.rms_norm_eps, dtype)
        self.gate_up = Linear(c.hidden_size, 2 * c.intermediate_size, c.mlp_bias, dtype)
        self.down = Linear(c.intermediate_size, c.hidden_size, c.mlp_bias, dtype)

    def before(self, x: jax.Array, cos: jax.Array, sin: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Hidden states ``[num_tokens, hidden_size]`` to rotated q and k, and v: ``[num_tokens, heads, head_size]``."""
        heads, kv_heads = self.num_query_heads, self.num_kv_heads
        qkv = self.qkv(self.input_norm(x)).reshape(len(x), heads + 2 * kv_heads, self.head_size)
        rotated = _rotate(qkv[:, : heads + kv_heads], cos, sin)
        return rotated[:, :heads], rotated[:, heads:], qkv[:, heads + kv_heads :]

    def after(self, x: jax.Array, attended: jax.Array) -> jax.Array:
        """Adds attention's output ``[num_tokens, heads, head_size]`` and the feed-forward part to the hidden states."""
        x = x + self.output(attended.reshape(len(x), -1))
        gate, up = jnp.split(self.gate_up(self.post_norm(x)), 2, axis=-1)
        return x + self.down(jax.nn.silu(gate) * up)


class Llama(nnx.Module):
    """Embedding, layers, final norm, head."""

    def __init__(self, config: ModelConfig, dtype: jnp.dtype) -> None:
        self.embedding = nnx.Param(jnp.zeros((config.vocab_size, config.hidden_size), dtype))
        self.layers = nnx.List([Layer(config, dtype) for _ in range(config.num_layers)])
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype)
        self.head = None if config.tied_embeddings else Linear(config.hidden_size, config.vocab_size, False, dtype)

    def embed(self, token_ids: jax.Array) -> jax.Array:
        """``[num_tokens]`` int32 to ``[num_tokens, hidden_size]``."""
        return row(self.embedding[...], token_ids)

    def logits(self, x: jax.Array) -> jax.Array:
        """Hidden states ``[num_tokens, hidden_size]`` to float32 ``[num_tokens, vocab_size]``."""
        x = self.norm(x)
        if self.head is not None:
            return self.head(x).astype(jnp.float32)
        return product(x, self.embedding[...]).astype(jnp.float32)


def rope_tables(config: ModelConfig, positions: jax.Array, dtype: jnp.dtype) -> tuple[jax.Array, jax.Array]:
    """Cosines and sines ``[num_tokens, head_size]`` of positions ``[num_tokens]``, computed in float32."""
    angles = positions[:, None].astype(jnp.float32) * _frequencies(config)
    angles = jnp.concatenate([angles, angles], axis=-1)
    return jnp.cos(angles).astype(dtype), jnp.sin(angles).astype(dtype)


def _frequencies(config: ModelConfig) -> np.ndarray[tuple[int], np.dtype[np.float32]]:
    """Radians a position ``[head_size / 2]``."""
    exponents = np.arange(0, config.head_size, 2, dtype=np.float32) / np.float32(config.head_size)
    plain = (1.0 / np.float32(config.rope_theta) ** exponents).astype(np.float32)
    scaling = config.rope_scaling
    return plain if scaling is None else _stretched(plain, scaling).astype(np.float32)


def _stretched(plain: np.ndarray, scaling: RopeScaling) -> np.ndarray:
    if scaling.kind == "linear":
        return plain / scaling.factor
    turns = scaling.original_positions * plain / (2 * math.pi)  # of each frequency over the trained length
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    kept = np.clip((turns - low) / (high - low), 0.0, 1.0)
    return plain * (kept + (1.0 - kept) / scaling.factor)


def _rotate(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    half = x.shape[-1] // 2
    swapped = jnp.concatenate([-x[..., half:], x[..., :half]], axis=-1)
    return x * cos[:, None] + swapped * sin[:, None]
