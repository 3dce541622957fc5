"""An oracle for whole models: a Hugging Face folder in NumPy and float64, all tokens at once under a mask."""

import json
import math

import numpy as np
from safetensors.numpy import load_file


class DenseLlama:
    """Llama, Mistral and Qwen2. ``round_to``: a dtype that every weight is rounded to first."""

    def __init__(self, folder, round_to="float32"):
        self.config = {"rms_norm_eps": 1e-6} | json.loads((folder / "config.json").read_text())
        weights = load_file(folder / "model.safetensors")
        self.weights = {name: weight.astype(round_to).astype(np.float64) for name, weight in weights.items()}

    def __call__(self, tokens, hidden=None):
        """Logits ``[n, vocab]`` and attention ``[layers, heads, n, n]``; ``hidden`` ``[n, n]`` is masked too."""
        config, num_tokens = self.config, len(tokens)
        mask = np.triu(np.ones((num_tokens, num_tokens), bool), 1)
        mask = mask if hidden is None else mask | hidden
        x, attention = self.weights["model.embed_tokens.weight"][np.asarray(tokens)], []
        for layer in (f"model.layers.{index}." for index in range(config["num_hidden_layers"])):
            added, weights = self._attend(layer + "self_attn.", self._normed(layer + "input_layernorm", x), mask)
            x = x + added
            attention.append(weights)
            normed = self._normed(layer + "post_attention_layernorm", x)
            gate, up = (self._linear(f"{layer}mlp.{name}_proj", normed) for name in ("gate", "up"))
            x = x + self._linear(layer + "mlp.down_proj", gate / (1 + np.exp(-gate)) * up)
        head = self.weights.get("lm_head.weight", self.weights["model.embed_tokens.weight"])
        return self._normed("model.norm", x) @ head.T, np.stack(attention)

    def greedy(self, prompt, count):
        tokens = list(prompt)
        for _ in range(count):
            tokens.append(int(self(tokens)[0][-1].argmax()))
        return tokens[len(prompt) :]

    def _attend(self, name, x, mask):
        num_tokens, heads = len(x), self.config["num_attention_heads"]
        q, k, v = (
            self._linear(f"{name}{part}_proj", x).reshape(num_tokens, -1, self._head_size).swapaxes(0, 1)
            for part in "qkv"
        )
        k, v = (np.repeat(each, heads // len(each), axis=0) for each in (self._rotated(k), v))
        logits = self._rotated(q) @ k.swapaxes(1, 2) / math.sqrt(self._head_size)
        logits[:, mask] = -np.inf
        weights = np.exp(logits - logits.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        return self._linear(name + "o_proj", (weights @ v).swapaxes(0, 1).reshape(num_tokens, -1)), weights

    def _linear(self, name, x):
        return x @ self.weights[f"{name}.weight"].T + self.weights.get(f"{name}.bias", 0.0)

    def _normed(self, name, x):
        return (
            self.weights[f"{name}.weight"] * x / np.sqrt((x**2).mean(-1, keepdims=True) + self.config["rms_norm_eps"])
        )

    @property
    def _head_size(self):
        return self.config.get("head_dim") or self.config["hidden_size"] // self.config["num_attention_heads"]

    def _rotated(self, x):
        """``[heads, n, head_size]``: pairs (i, i + head_size / 2) turned by an angle that grows with the position."""
        half = self._head_size // 2
        angles = np.arange(x.shape[1])[:, None] * [self._frequency(index / half) for index in range(half)]
        cos, sin, first, second = np.cos(angles), np.sin(angles), x[..., :half], x[..., half:]
        return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)

    def _frequency(self, share):
        """Llama 3.1 divides slow frequencies by the factor, keeps fast ones, and blends those in between."""
        rope = self.config.get("rope_parameters", {"rope_type": "default"})
        frequency = rope.get("rope_theta", 10000.0) ** -share
        if rope["rope_type"] == "default":
            return frequency
        turns = rope["original_max_position_embeddings"] * frequency / (2 * math.pi)
        low, high = rope["low_freq_factor"], rope["high_freq_factor"]
        kept = min(max((turns - low) / (high - low), 0.0), 1.0)
        return frequency * (kept + (1 - kept) / rope["factor"])
