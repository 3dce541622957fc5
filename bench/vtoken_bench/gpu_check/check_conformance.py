"""Conformance with an executor whose arrays lie on the GPU."""

import random
import time
from collections.abc import Callable
from typing import Any, Final

from vtoken_bench.gpu_check.ground import Ground
from vtoken_torch.executor import TorchExecutor

__all__ = ["CUDAExecutor", "check_jax", "check_torch"]

_NUM_SEEDS: Final = 30
_BUDGET_S: Final = 35.0
_REHEARSED: Final = ["fingerprint/golden_value_of_finite_bfloat16"]


class CUDAExecutor(TorchExecutor):
    """The PyTorch executor on the first GPU: ``--executor vtoken_bench.gpu_check.check_conformance:CUDAExecutor``."""

    def __init__(self) -> None:
        super().__init__("cuda:0")


def check_torch(ground: Ground) -> None:
    """The PyTorch executor, both regimes."""
    _check(ground, "torch", TorchExecutor if ground.is_dry else CUDAExecutor)


def check_jax(ground: Ground) -> None:
    """The JAX executor on JAX's GPU."""
    from vtoken_bench.gpu_check.check_jax import require_backend
    from vtoken_jax.executor import JaxExecutor

    require_backend(ground)
    _check(ground, "jax", JaxExecutor)


def _check(ground: Ground, name: str, make: Callable[[], Any]) -> None:
    """Named cases, then random programs, as many as the time allows; says how many."""
    from vtoken_conformance.case import load_cases
    from vtoken_conformance.run import run_all, select_jobs

    jobs = select_jobs(load_cases(), _REHEARSED if ground.is_dry else [], _NUM_SEEDS)
    random.Random(0).shuffle(jobs)  # where time ends before they do, no chapter goes without
    end = time.monotonic() + _BUDGET_S
    for row, failure in run_all(jobs, {name: make}):
        why = "" if failure is None else f"{failure.rule}, step {failure.step}: {failure.what}; {failure.rerun}"
        ground.check(row.case, failure is None, why)
        if time.monotonic() > end:
            break
    if len(ground.checks) < len(jobs):
        ground.notes.append(f"{len(ground.checks)} of {len(jobs)} programs in {_BUDGET_S:.0f} s")
