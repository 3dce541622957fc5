"""JAX's decode kernels and token move on the GPU."""

import time
from collections.abc import Callable
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np

from vtoken.executor import KVSpec
from vtoken.plugins import first_line
from vtoken_bench.gpu_check.check_jax import IMPLEMENTATIONS, require_backend
from vtoken_bench.gpu_check.ground import Ground
from vtoken_jax.compaction import move_tokens
from vtoken_jax.kernels.decode import Implementation, paged_decode
from vtoken_jax.kv_cache import make_cache

__all__ = ["time_jax"]

_BLOCK_SIZE: Final = 16
_NUM_CALLS: Final = 20
"""Of one measurement: waiting for the device costs as much as a short kernel."""


def time_jax(ground: Ground) -> None:
    """Decode of one layer by each implementation, and moves in a pool of 32 layers; the host's dispatch is in it."""
    require_backend(ground)
    for num_reqs, length in ((2, 32),) if ground.is_dry else ((1, 4096), (32, 4096)):
        _time_decode(ground, num_reqs, length)
    _time_moves(ground)


def _time_decode(ground: Ground, num_reqs: int, length: int) -> None:
    heads, head_size = ((2, 1), 16) if ground.is_dry else ((32, 8), 128)
    max_blocks = length // _BLOCK_SIZE
    rng = np.random.default_rng(7)
    shape = ((num_reqs * max_blocks + 1) * _BLOCK_SIZE, heads[1] * head_size)
    planes = [jnp.asarray(rng.standard_normal(shape, np.float32), jnp.bfloat16).view(jnp.uint16) for _ in range(2)]
    table = rng.permutation(np.arange(1, num_reqs * max_blocks + 1)).astype(np.int32).reshape(num_reqs, max_blocks)
    arguments = (
        jnp.asarray(rng.standard_normal((num_reqs, heads[0], head_size), np.float32), jnp.bfloat16),
        *planes,
        jnp.asarray(table),
        jnp.full(num_reqs, max_blocks, jnp.int32),
        jnp.full((num_reqs, max_blocks), 2**_BLOCK_SIZE - 1, jnp.uint32),
    )
    works: dict[str, Callable[[], object]] = {}
    for name in IMPLEMENTATIONS[:1] if ground.is_dry else IMPLEMENTATIONS:

        def run(name: Implementation = name) -> Any:
            return paged_decode(
                *arguments, scale=head_size**-0.5, kv_dtype="bfloat16", num_kv_heads=heads[1],
                block_size=_BLOCK_SIZE, implementation=name,
            )[0]  # fmt: skip

        try:
            _wait(run())
        except Exception as error:  # the checks have said so; the others are timed
            ground.notes.append(f"without {name}: {type(error).__name__}: {first_line(error)}")
            continue
        works[f"jax decode, {name}"] = run
    num_bytes = 4 * num_reqs * length * shape[1]
    ground.time(works, _us, num_bytes=num_bytes, repeats=5, reqs=num_reqs, live=length)


def _time_moves(ground: Ground) -> None:
    num_layers, num_blocks, num_moves = (1, 6, 16) if ground.is_dry else (32, 1025, 4096)
    spec = KVSpec(
        num_layers=num_layers,
        num_kv_heads=8,
        num_query_heads=8,
        head_size=128,
        dtype="bfloat16",
        block_size=_BLOCK_SIZE,
        num_blocks=num_blocks,
    )
    slots = np.random.default_rng(8).permutation(spec.num_slots).astype(np.int32)
    src, dst = jnp.asarray(slots[:num_moves]), jnp.asarray(slots[num_moves : 2 * num_moves])
    caches = [make_cache(spec)]  # donated by each call, so that the last is kept

    def move() -> Any:
        caches[0] = move_tokens(caches[0], src, dst)
        return caches[0]

    ground.time({"jax move": move}, _us, num_bytes=2 * num_moves * spec.token_bytes, repeats=5, moves=num_moves)


def _us(work: Callable[[], Any]) -> float:
    """Of one call, mean over several that are under way together."""
    _wait(work())
    start = time.perf_counter_ns()
    for _ in range(_NUM_CALLS):
        result = work()
    _wait(result)
    return (time.perf_counter_ns() - start) / 1e3 / _NUM_CALLS


def _wait(result: Any) -> None:
    jax.block_until_ready(result)  # type: ignore[no-untyped-call]
