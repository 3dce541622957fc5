"""The differences among jax 0.10.2, 0.11 and 0.12 that this package meets, each said once.

Pallas moves fast: what has another name or another shape from one release to the next is looked up here, and nowhere
else is a version asked for.
"""

import inspect
import warnings
from typing import Any

import jax
import jax.numpy as jnp

__all__ = [
    "TRITON_IS_MAINTAINED",
    "VERSION",
    "float32_shape",
    "mosaic_interpreter",
    "mosaic_load",
    "triton_load",
    "triton_params",
    "triton_store",
]

VERSION: tuple[int, ...] = jax.__version_info__

TRITON_IS_MAINTAINED = VERSION < (0, 11)
"""Whether Pallas' Triton lowering is kept up; 0.11 deprecates it in favour of Mosaic."""


def float32_shape(*shape: int) -> Any:
    """An abstract float32 array; jax gives its type no types."""
    make: Any = jax.ShapeDtypeStruct
    return make(shape, jnp.float32)


def _triton() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # from 0.11 on, at import and at the first use of a name
        from jax.experimental.pallas import triton
    return triton


def triton_params(**params: int) -> dict[str, Any]:
    """Keywords of ``pallas_call`` that choose the Triton lowering."""
    return {"compiler_params": _triton().CompilerParams(**params)}


def triton_load(ref: Any, **keywords: Any) -> jax.Array:
    """A masked load: ``mask``, ``other``."""
    loaded: jax.Array = _triton().load(ref, **keywords)
    return loaded


def triton_store(ref: Any, value: jax.Array, **keywords: Any) -> None:
    """A masked store: ``mask``."""
    _triton().store(ref, value, **keywords)


def mosaic_load(ref: Any, layout: Any) -> jax.Array:
    """A load into registers that lie as ``layout`` says; 0.10 asks for indices as well, 0.11 warns of them."""
    from jax.experimental.pallas import mosaic_gpu

    idx = inspect.signature(mosaic_gpu.load).parameters.get("idx")
    indices = ((),) if idx is not None and idx.default is inspect.Parameter.empty else ()
    loaded: jax.Array = mosaic_gpu.load(ref, *indices, layout=layout)
    return loaded


def mosaic_interpreter() -> Any | None:
    """Parameters that run a Mosaic kernel on the CPU and watch for races, or None: 0.11.1 exports them."""
    from jax.experimental.pallas import mosaic_gpu

    params: Any = getattr(mosaic_gpu, "InterpretGPUParams", None)
    return None if params is None else params(detect_races=True)
