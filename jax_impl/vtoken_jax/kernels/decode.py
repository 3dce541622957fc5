"""Decode attention over block tables and live words: one signature, and the choice of who computes it."""

from functools import partial
from typing import Literal, Protocol, get_args

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from vtoken.errors import SpecError
from vtoken_jax import compat
from vtoken_jax.kernels import decode_mosaic, decode_triton, decode_xla
from vtoken_jax.kernels.rows import (
    at_once,
    live_tokens,
    reference_attend,
    reference_elements,
    reference_live,
)

__all__ = ["Decode", "Implementation", "choose", "paged_decode", "reference_decode"]

Implementation = Literal["auto", "xla", "triton", "mosaic"]


class Decode(Protocol):
    """What each implementation computes: see ``paged_decode``; logits and lse in place of mass.

    Returns:
        out: ``[batch, num_query_heads, head_size]`` float32.
        logits: ``[batch, num_query_heads, max_blocks * block_size]`` float32; undefined where no token lives.
        lse: ``[batch, num_query_heads]`` float32, log of the sum of exp(logits) over live tokens; undefined if none.
    """

    def __call__(
        self,
        q: jax.Array,
        k_plane: jax.Array,
        v_plane: jax.Array,
        block_table: jax.Array,
        num_blocks: jax.Array,
        live_words: jax.Array,
        *,
        scale: float,
        kv_dtype: str,
        num_kv_heads: int,
        block_size: int,
    ) -> tuple[jax.Array, jax.Array, jax.Array]: ...


_DECODES: dict[str, Decode] = {
    "xla": decode_xla.decode,
    "triton": decode_triton.decode,
    "mosaic": decode_mosaic.decode,
}


def choose(
    implementation: Implementation, *, kv_dtype: str, head_size: int, block_size: int, platform: str | None = None
) -> Implementation:
    """The implementation that runs: ``auto`` takes the kernel that this jax maintains, on a GPU whose limits it meets.

    ``platform``: of the device that it runs on; None is that of JAX's default backend.

    Raises:
        SpecError: an unknown name, or a kernel that cannot take this shape.
    """
    if implementation not in get_args(Implementation):
        raise SpecError(
            f"implementation={implementation!r} is unknown: use one of {', '.join(get_args(Implementation))}"
        )
    refusal = decode_mosaic.refusal(kv_dtype=kv_dtype, head_size=head_size, block_size=block_size)
    if implementation == "mosaic" and refusal:
        raise SpecError(f"the Mosaic kernel cannot take {refusal}: use implementation='triton' or 'xla'")
    if implementation != "auto":
        return implementation
    if (platform or jax.default_backend()) != "gpu":
        return "xla"
    if compat.TRITON_IS_MAINTAINED:
        return "triton"
    return "xla" if refusal else "mosaic"


@partial(
    jax.jit, static_argnames=("scale", "kv_dtype", "num_kv_heads", "block_size", "with_mass", "implementation")
)  # so that a model's layers share one trace and one lowered kernel
def paged_decode(
    q: jax.Array,
    k_plane: jax.Array,
    v_plane: jax.Array,
    block_table: jax.Array,
    num_blocks: jax.Array,
    live_words: jax.Array,
    *,
    scale: float,
    kv_dtype: str,
    num_kv_heads: int,
    block_size: int,
    with_mass: bool = False,
    implementation: Implementation = "auto",
) -> tuple[jax.Array, jax.Array | None]:
    """Attention of one layer for one query of each request, over the request's live tokens, accumulated in float32.

    Dead slots never leak, NaN included; a request without a live token gives zeros.

    Args:
        q: ``[batch, num_query_heads, head_size]``, any float dtype.
        k_plane, v_plane: ``[num_slots, num_kv_heads * head_size]``, bits of ``kv_dtype`` as unsigned integers.
        block_table: ``[batch, max_blocks]`` int32, padded by the null block.
        num_blocks: ``[batch]`` int32.
        live_words: ``[batch, max_blocks * words_per_block]`` uint32, as in ``Tables``.
        scale: of the logits.
        kv_dtype: ``float32``, ``bfloat16`` or ``float16``.
        num_kv_heads, block_size: of the pool.
        with_mass: whether mass is computed, from the logits that the kernel wrote.
        implementation: who computes it; see ``choose``.

    Returns:
        out: like ``q``, float32.
        mass: ``[batch, max_blocks * block_size]`` float32 in table order: softmax weights summed over query heads, 0
            where no token lives. None without ``with_mass``.

    Raises:
        SpecError: as ``choose`` says.
    """
    name = choose(implementation, kv_dtype=kv_dtype, head_size=q.shape[-1], block_size=block_size)
    out, logits, lse = _DECODES[name](
        q, k_plane, v_plane, block_table, num_blocks, live_words,
        scale=scale, kv_dtype=kv_dtype, num_kv_heads=num_kv_heads, block_size=block_size,
    )  # fmt: skip
    if not with_mass:
        return out, None
    live = live_tokens(live_words, num_blocks, block_size)[:, None]
    return at_once((out, jnp.sum(jnp.where(live, jnp.exp(logits - lse[..., None]), 0.0), axis=1)))


# -- reference -------------------------------------------------------------------------------------------------------


def reference_decode(
    q: npt.ArrayLike,
    k_plane: npt.ArrayLike,
    v_plane: npt.ArrayLike,
    block_table: npt.ArrayLike,
    num_blocks: npt.ArrayLike,
    live_words: npt.ArrayLike,
    *,
    scale: float,
    kv_dtype: str,
    num_kv_heads: int,
    block_size: int,
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Output and mass as ``paged_decode`` gives them, on the host in float64, one request and query head at a time."""
    queries, table = np.asarray(q).astype(np.float64), np.asarray(block_table)
    keys, values = (reference_elements(plane, kv_dtype) for plane in (k_plane, v_plane))
    batch, num_query_heads, head_size = queries.shape
    out, mass = np.zeros(queries.shape), np.zeros((batch, table.shape[1] * block_size))
    for request, (words, held) in enumerate(zip(np.asarray(live_words), np.asarray(num_blocks), strict=True)):
        live = np.array(reference_live(words, held, block_size), int)
        slots = table[request, live // block_size] * block_size + live % block_size
        for head in range(num_query_heads if len(live) else 0):
            start = head // (num_query_heads // num_kv_heads) * head_size
            rows = slots, slice(start, start + head_size)
            out[request, head], weights = reference_attend(queries[request, head], keys[rows], values[rows], scale)
            mass[request, live] += weights
    return out, mass
