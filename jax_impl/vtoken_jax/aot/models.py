"""Shapes of models that are compiled for: the paper's three, and the small one that runs on a CPU."""

from vtoken_jax.model.config import ModelConfig, RopeScaling

__all__ = ["MODELS", "heads_of"]

MODELS = {
    "SmolLM2-135M": ModelConfig(
        family="llama", vocab_size=49_152, hidden_size=576, intermediate_size=1536, num_layers=30, num_query_heads=9,
        num_kv_heads=3, head_size=64, max_positions=8192, rms_norm_eps=1e-5, rope_theta=1e5, tied_embeddings=True,
    ),
    "Llama-3.1-8B": ModelConfig(
        family="llama", vocab_size=128_256, hidden_size=4096, intermediate_size=14_336, num_layers=32,
        num_query_heads=32, num_kv_heads=8, head_size=128, max_positions=8192, rms_norm_eps=1e-5, rope_theta=5e5,
        rope_scaling=RopeScaling("llama3", 8.0, 1.0, 4.0, original_positions=8192),
    ),
    "Mistral-7B-v0.3": ModelConfig(
        family="mistral", vocab_size=32_768, hidden_size=4096, intermediate_size=14_336, num_layers=32,
        num_query_heads=32, num_kv_heads=8, head_size=128, max_positions=8192, rms_norm_eps=1e-5, rope_theta=1e6,
    ),
    "Qwen2.5-7B": ModelConfig(
        family="qwen2", vocab_size=152_064, hidden_size=3584, intermediate_size=18_944, num_layers=28,
        num_query_heads=28, num_kv_heads=4, head_size=128, max_positions=8192, rms_norm_eps=1e-6, rope_theta=1e6,
        qkv_bias=True,
    ),
}  # fmt: skip
"""``max_positions`` is that of an engine: mass is kept for so many."""


def heads_of(model: str) -> tuple[int, int, int]:
    """Query heads, KV heads, head size."""
    config = MODELS[model]
    return config.num_query_heads, config.num_kv_heads, config.head_size
