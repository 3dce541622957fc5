"""The JAX executor: KV in donated device arrays, moved, hashed and attended to by compiled pure functions."""

from vtoken.plugins import require_extra

require_extra("vtoken_jax", "jax", "jax", "numpy")
