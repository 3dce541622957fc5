"""Products of a few tokens with large matrices, in the form that XLA's CPU backend computes fastest.

In float32 a fused multiply and sum over tiles ``[out / 32, in, 32]`` goes to YNNPACK, which reads each weight once, as
it lies; a product of matrices packs them anew at every call. Tiles of 16 take half as long again, and of a large
vocabulary ten times as long.
One ``x`` for two products would undo it: XLA then writes the broadcast ``x`` out; stack the weights instead.

In bfloat16 it is the product of matrices that YNNPACK computes from narrow weights, if it may give float32; tiles are
widened first, and take two to four times as long for up to eight tokens.
"""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from vtoken.executor import DType
from vtoken_jax.kernels.rows import at_once

__all__ = ["as_tiles", "product", "row", "tiles_pay"]

_TILE = 32

_Multiply = Callable[[jax.Array, jax.Array], jax.Array]


def tiles_pay(platform: str, dtype: DType) -> bool:
    """Whether weights of ``dtype`` should lie in tiles there."""
    return platform == "cpu" and dtype != "bfloat16"


def as_tiles(weight: np.ndarray) -> np.ndarray:
    """``[out, in]`` to ``[out / 32, in, 32]``; as it is where 32 does not divide ``out``."""
    num_out, num_in = weight.shape
    if num_out % _TILE:
        return weight
    return np.ascontiguousarray(weight.reshape(-1, _TILE, num_in).transpose(0, 2, 1))


def product(x: jax.Array, weight: jax.Array) -> jax.Array:
    """``[num_tokens, in]`` times the transpose of a weight, ``[out, in]`` or in tiles: ``[num_tokens, out]``."""
    if weight.ndim == 3:
        wide = _of_two_or_more(_by_tile, x, weight)
    else:
        wide = jax.lax.platform_dependent(x, weight, cpu=partial(_of_two_or_more, _whole), default=_whole)
    return wide.astype(x.dtype)


def _of_two_or_more(multiply: _Multiply, x: jax.Array, weight: jax.Array) -> jax.Array:
    """A CPU would take one token for a batch of tiny products, or of vectors, at many times the cost."""
    num_tokens = len(x)
    return multiply(jnp.pad(x, ((0, 1), (0, 0))) if num_tokens == 1 else x, weight)[:num_tokens]


def _whole(x: jax.Array, weight: jax.Array) -> jax.Array:
    wide: jax.Array = jax.lax.dot_general(x, weight, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)
    return wide


def _by_tile(x: jax.Array, weight: jax.Array) -> jax.Array:
    tokens = at_once(x).astype(jnp.float32)  # or what computes x is computed anew for each tile
    by_tile = jnp.sum(tokens[None, :, :, None] * weight[:, None].astype(jnp.float32), axis=2)
    return by_tile.transpose(1, 0, 2).reshape(len(x), -1)


def row(weight: jax.Array, index: jax.Array) -> jax.Array:
    """Rows ``index`` ``[n]`` of a weight, ``[out, in]`` or in tiles: ``[n, in]``."""
    if weight.ndim == 2:
        whole: jax.Array = weight[index]
        return whole
    size = weight.shape[2]
    rows: jax.Array = weight[index // size, :, index % size]
    return rows
