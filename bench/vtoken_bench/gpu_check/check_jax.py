"""JAX's decode attention against float64, in each of its implementations."""

from functools import partial
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from vtoken.errors import SpecError
from vtoken_bench.gpu_check.batch import Batch, Shape, make_batch
from vtoken_bench.gpu_check.ground import TOLERANCES, Ground
from vtoken_jax import compat
from vtoken_jax.kernels import decode_mosaic
from vtoken_jax.kernels.decode import Implementation, paged_decode

__all__ = ["IMPLEMENTATIONS", "arguments", "check_decode", "require_backend"]

IMPLEMENTATIONS: Final[tuple[Implementation, ...]] = ("xla", "triton", "mosaic")

_SHAPES: Final = (Shape(32, 8, 128, 16, 20), Shape(8, 1, 64, 32, 6), Shape(4, 4, 128, 128, 2))
_TINY: Final = (Shape(2, 1, 16, 16, 2),)


def require_backend(ground: Ground) -> None:
    """Raises SpecError where JAX has no GPU, although there is one."""
    backend = jax.default_backend()
    if not ground.is_dry and backend != "gpu":
        raise SpecError(f"JAX runs on {backend}: its CUDA plugin comes with VTOKEN_DEVICE=cuda bash scripts/setup.sh")


def check_decode(ground: Ground) -> None:
    """Output and mass; NaN in dead slots, no live token, padding."""
    require_backend(ground)
    for number, shape in enumerate(_TINY if ground.is_dry else _SHAPES):
        for dtype in ("bfloat16",) if ground.is_dry else TOLERANCES:
            batch = make_batch(shape, dtype, seed=number)
            for name in IMPLEMENTATIONS:
                _check(ground, batch, dtype, name)
    if ground.is_dry:
        ground.notes.append("not rehearsed: the Triton lowering and Mosaic, which run on GPUs alone")


def _check(ground: Ground, batch: Batch, dtype: str, name: Implementation) -> None:
    shape, what = batch.shape, f"{batch.shape} {dtype} {name}"
    refusal = decode_mosaic.refusal(kv_dtype=dtype, head_size=shape.head_size, block_size=shape.block_size)
    if name == "mosaic" and refusal:
        ground.notes.append(f"{what}: not taken, {refusal}")
        return
    if ground.is_dry and name != "xla":
        return
    if name == "triton" and not compat.TRITON_IS_MAINTAINED:
        ground.notes.append(f"{what}: not checked, jax {jax.__version__} no longer maintains the lowering")
        return
    decode = partial(
        paged_decode,
        scale=batch.scale,
        kv_dtype=dtype,
        num_kv_heads=shape.num_kv_heads,
        block_size=shape.block_size,
        with_mass=True,
        implementation=name,
    )
    try:
        out, mass = decode(*arguments(batch, dtype))
        got, got_mass = np.asarray(out), np.asarray(mass)
    except Exception as error:  # one implementation may not compile; the next is checked all the same
        ground.check(what, False, f"{type(error).__name__}: {error}"[:300])
        return
    expected, _, expected_mass = batch.expected()
    ground.close(f"{what}: output", got, expected, dtype)
    ground.close(f"{what}: mass", got_mass, expected_mass, "float32")


def arguments(batch: Batch, dtype: str) -> tuple[Any, ...]:
    """As ``paged_decode`` takes them: KV as bits, tables padded by the null block."""
    _, pool_blocks, block_size, num_kv_heads, head_size = batch.kv.shape
    planes: NDArray[Any] = batch.kv.reshape(2, pool_blocks * block_size, num_kv_heads * head_size)
    bits = np.asarray(jnp.asarray(planes, dtype))
    bits = bits.view(f"<u{bits.itemsize}")
    held = np.arange(batch.table.shape[1]) < batch.num_blocks[:, None]
    words = batch.live_words.view("<u4").reshape(len(batch.table), -1)
    table = np.where(held, batch.table, 0).astype(np.int32)
    return tuple(map(jnp.asarray, (batch.q.astype(dtype), bits[0], bits[1], table, batch.num_blocks, words)))
