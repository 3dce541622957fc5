"""A flax NNX decoder of the Llama family, weights from Hugging Face folders, and one packed forward over the pool."""

from vtoken.plugins import require_extra

require_extra("vtoken_jax.model", "jax", "flax", "safetensors", "orbax")
