"""What is compiled: kernels at the shapes of known models, whole steps, changes of the pool, and negative controls."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from vtoken.executor import DType, KVSpec
from vtoken.policies.base import MassNeed
from vtoken_jax import compat
from vtoken_jax.aot.models import MODELS, heads_of
from vtoken_jax.aot.target import Target
from vtoken_jax.compaction import move_tokens
from vtoken_jax.device_tables import words_per_block
from vtoken_jax.fingerprint import add_tokens, make_weights
from vtoken_jax.kernels import decode_mosaic
from vtoken_jax.kernels.decode import Implementation, paged_decode
from vtoken_jax.kv_cache import KVCache, make_cache, storage_dtype, write_tokens
from vtoken_jax.model.abstract import trace_step

__all__ = ["Case", "cases"]

_BLOCK_SIZE, _NUM_BLOCKS, _WIDTH, _BATCH = 16, 2048, 128, 8
_NUM_TOKENS = 256
_MAX_REGISTERS = 255
_CALLS = {"mosaic": "mosaic_gpu", "triton": "xla.gpu.triton"}
_SLACK = 1 << 20  # bytes of temporary memory that no check cares about

_SMOLLM2 = KVSpec(
    num_layers=30, num_kv_heads=3, num_query_heads=9, head_size=64, dtype="bfloat16", block_size=_BLOCK_SIZE,
    num_blocks=_NUM_BLOCKS,
)  # fmt: skip
_KERNEL_MODELS = ("SmolLM2-135M", "Llama-3.1-8B", "Qwen2.5-7B")  # of different heads


@dataclass(frozen=True, slots=True)
class Case:
    """One program.

    Attributes:
        kernel, shape: its name in the table.
        trace: gives a ``jax.stages.Traced`` of shapes that the target placed.
        max_temp_bytes: of temporary memory.
        max_registers: of a thread.
        num_aliases: outputs that must lie in the memory of their inputs.
        plane: shape of a KV array, which nothing may copy or convert whole.
        tensor_core: whether the code must have matrix instructions.
        call: a piece of the name by which the program calls our kernel.
        breaks: of a negative control, a piece of the reason that must be found.
    """

    kernel: str
    shape: str
    trace: Callable[[Target], Any]
    max_temp_bytes: int = _SLACK
    max_registers: int = _MAX_REGISTERS
    num_aliases: int = 0
    plane: tuple[int, int] | None = None
    tensor_core: bool = False
    call: str | None = None
    breaks: str | None = None


def cases() -> Iterator[Case]:
    """All of them, controls last."""
    kernels: tuple[Implementation, ...] = ("mosaic", "triton")
    for implementation in kernels:
        for model in _KERNEL_MODELS:
            yield _decode_case(model, "bfloat16", implementation)
        yield _decode_case("SmolLM2-135M", "float32", implementation)
    yield _decode_case("SmolLM2-135M", "bfloat16", "xla")
    yield from _pool_cases()
    yield from _step_cases()
    yield from _controls()


def _decode_case(model: str, dtype: DType, implementation: Implementation, **changes: Any) -> Case:
    heads, kv_heads, head_size = heads_of(model)
    num_slots, width = _NUM_BLOCKS * _BLOCK_SIZE, kv_heads * head_size
    num_tokens = _WIDTH * _BLOCK_SIZE
    logits = 4 * 4 * _BATCH * heads * num_tokens  # and their softmax
    gathered = 4 * 4 * num_tokens * width if implementation == "xla" else 0  # K and V of one request
    return Case(
        f"decode {implementation}",
        f"{model} {dtype}",
        lambda target: paged_decode.trace(
            *target.place(_decode_arguments(model, dtype)), scale=head_size**-0.5, kv_dtype=dtype,
            num_kv_heads=kv_heads, block_size=_BLOCK_SIZE, with_mass=True, implementation=implementation,
        ),
        max_temp_bytes=_SLACK + logits + gathered,
        plane=(num_slots, width),
        tensor_core=implementation == "triton" and dtype != "float32",
        call=_CALLS.get(implementation),
        **changes,
    )  # fmt: skip


def _decode_arguments(model: str, dtype: DType) -> tuple[Any, ...]:
    heads, kv_heads, head_size = heads_of(model)
    shape: Any = jax.ShapeDtypeStruct
    plane = shape((_NUM_BLOCKS * _BLOCK_SIZE, kv_heads * head_size), storage_dtype(jnp.dtype(dtype).itemsize))
    return (
        shape((_BATCH, heads, head_size), jnp.dtype(dtype)),
        plane,
        plane,
        shape((_BATCH, _WIDTH), jnp.int32),
        shape((_BATCH,), jnp.int32),
        shape((_BATCH, _WIDTH * words_per_block(_BLOCK_SIZE)), jnp.uint32),
    )


def _pool_arguments() -> tuple[Any, Any, Any]:
    """Cache, slots, and the tokens that a write stores."""
    spec, shape = _SMOLLM2, jax.ShapeDtypeStruct
    make: Any = shape
    cache = jax.eval_shape(lambda: make_cache(spec))
    kv = (_NUM_TOKENS, 2 * spec.num_layers, spec.num_kv_heads * spec.head_size)
    return cache, make((_NUM_TOKENS,), jnp.int32), make(kv, storage_dtype(spec.item_bytes))


def _pool_case(name: str, trace: Callable[[Target], Any], *, aliased: bool = True, breaks: str | None = None) -> Case:
    spec = _SMOLLM2
    return Case(
        name,
        f"SmolLM2-135M {spec.dtype} {_NUM_TOKENS} tokens",
        trace,
        max_temp_bytes=_SLACK + 3 * _NUM_TOKENS * spec.token_bytes,
        num_aliases=(2 * spec.num_layers + 1) * aliased,
        plane=(spec.num_slots, spec.num_kv_heads * spec.head_size),
        breaks=breaks,
    )


def _pool_cases() -> Iterator[Case]:
    def move(target: Target) -> Any:
        cache, slots, _ = target.place(_pool_arguments())
        return move_tokens.trace(cache, slots, slots)

    def write(target: Target) -> Any:
        cache, slots, kv = target.place(_pool_arguments())
        return write_tokens.trace(cache, slots, slots, kv)

    def fingerprint(target: Target) -> Any:
        cache, slots, _ = target.place(_pool_arguments())
        weights = jax.eval_shape(
            lambda: make_weights(
                num_planes=2 * _SMOLLM2.num_layers,
                width=_SMOLLM2.num_kv_heads * _SMOLLM2.head_size,
                item_bytes=_SMOLLM2.item_bytes,
            )
        )
        make: Any = jax.ShapeDtypeStruct
        total, count = target.place((make((2,), jnp.uint32), make((), jnp.int32)))
        return add_tokens.trace(total, cache, target.place(weights), slots, count)

    yield _pool_case("move", move)
    yield _pool_case("write", write)
    yield _pool_case("fingerprint", fingerprint, aliased=False)


def _step_cases() -> Iterator[Case]:
    for model in MODELS:
        yield _step_case(model, (_BATCH, 1), "mosaic")
    yield _step_case("SmolLM2-135M", (1, _NUM_TOKENS), "mosaic")


def _step_case(model: str, shape: tuple[int, int], implementation: Any) -> Case:
    config, (rows, tokens) = MODELS[model], shape
    kind = "decode" if tokens == 1 else "prefill"
    return Case(
        f"step {kind} {implementation}",
        f"{model} bfloat16 {rows} x {tokens}",
        lambda target: trace_step(
            config, "bfloat16", (shape,), num_blocks=_NUM_BLOCKS, block_size=_BLOCK_SIZE, width_blocks=_WIDTH,
            need=MassNeed(), implementation=implementation, place=target.place,
        ),
        max_temp_bytes=64 << 20,
        num_aliases=2 * config.num_layers + 2,
        call=_CALLS[implementation] if tokens == 1 else None,
        plane=(_NUM_BLOCKS * _BLOCK_SIZE, config.num_kv_heads * config.head_size),
    )  # fmt: skip


def _controls() -> Iterator[Case]:
    """Programs that are right in value, and each break one bound."""

    move: Any = move_tokens
    moved_of: Any = move.__wrapped__
    barrier: Any = jax.lax.optimization_barrier

    def undonated(target: Target) -> Any:
        cache, slots, _ = target.place(_pool_arguments())
        return jax.jit(moved_of).trace(cache, slots, slots)

    def widened(target: Target) -> Any:
        def move_wide(cache: KVCache, src: jax.Array, dst: jax.Array) -> Any:
            wide = barrier(jax.tree.map(lambda plane: plane.astype(jnp.uint32), cache))
            moved = barrier(moved_of(wide, src, dst))
            return jax.tree.map(lambda plane, old: plane.astype(old.dtype), moved, cache)

        cache, slots, _ = target.place(_pool_arguments())
        return jax.jit(move_wide, donate_argnums=0).trace(cache, slots, slots)

    def widened_in_part(target: Target) -> Any:
        def move_and_widen(cache: KVCache, src: jax.Array, dst: jax.Array) -> Any:
            moved = moved_of(cache, src, dst)
            wide = barrier(moved.k[0].astype(jnp.uint32))  # one array of 60
            return moved._replace(k=(wide.astype(moved.k[0].dtype), *moved.k[1:]))

        cache, slots, _ = target.place(_pool_arguments())
        return jax.jit(move_and_widen, donate_argnums=0).trace(cache, slots, slots)

    def spilling(target: Target) -> Any:
        heads, kv_heads, head_size = heads_of("Llama-3.1-8B")
        decode = partial(
            decode_mosaic.decode, scale=head_size**-0.5, kv_dtype="bfloat16", num_kv_heads=kv_heads,
            block_size=_BLOCK_SIZE, sum_columns=heads * head_size,
        )  # fmt: skip
        return jax.jit(decode).trace(*target.place(_decode_arguments("Llama-3.1-8B", "bfloat16")))

    def square(matrix_ref: Any, out_ref: Any) -> None:
        matrix = matrix_ref[...]
        out_ref[...] = jnp.dot(matrix, matrix)

    def overflowing(target: Target) -> Any:
        make: Any = jax.ShapeDtypeStruct
        matrix = make((512, 512), jnp.bfloat16)
        call = pl.pallas_call(square, out_shape=matrix, **compat.triton_params(num_warps=4))
        return jax.jit(call).trace(target.place(matrix))

    yield _pool_case("control: move, not donated", undonated, breaks="aliases")
    yield _pool_case("control: move, widened", widened, breaks="temporary memory")
    in_part = _pool_case("control: move, one array widened", widened_in_part, breaks="of a whole KV array")
    yield replace(in_part, max_temp_bytes=64 << 20)  # so that the copy alone is held against it
    yield _decode_control("control: decode mosaic, all sums at once", spilling, "spill")
    yield _decode_control("control: triton, 512 KB of shared memory", overflowing, "does not compile")
    plain = _decode_case("SmolLM2-135M", "float16", "mosaic")  # which multiplies without them
    yield replace(plain, kernel="control: decode mosaic, tensor cores", tensor_core=True, breaks="tensor-core")


def _decode_control(name: str, trace: Callable[[Target], Any], breaks: str) -> Case:
    return Case(name, "Llama-3.1-8B bfloat16", trace, max_temp_bytes=64 << 20, breaks=breaks)
