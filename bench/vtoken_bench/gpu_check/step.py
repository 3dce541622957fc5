"""The steps, in the order in which they run: correctness before times."""

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Literal

from vtoken_bench.gpu_check.ground import Ground

__all__ = ["STEPS", "Step"]


@dataclass(frozen=True, slots=True)
class Step:
    """One thing to check or to time.

    Attributes:
        name: as the table shows it.
        what: in a few words.
        where: ``module:function``; the function takes a ``Ground``.
        limit_s: seconds after which it is ended.
        group: steps of one group share a process, in which only their framework has touched the device.
    """

    name: str
    what: str
    where: str
    limit_s: float = 60
    group: Literal["torch", "jax"] = "torch"

    def load(self) -> Callable[[Ground], None]:
        """Its function."""
        module, _, function = self.where.partition(":")
        run: Callable[[Ground], None] = getattr(importlib.import_module(module), function)
        return run


_HERE: Final = "vtoken_bench.gpu_check"


STEPS: Final = (
    Step("decode", "decode attention: output, lse, mass against float64", f"{_HERE}.check_decode:check_decode", 90),
    Step("move", "token move, bit for bit; INV-5", f"{_HERE}.check_copies:check_move"),
    Step("fingerprint", "fingerprint kernel, the spec's integers", f"{_HERE}.check_copies:check_fingerprint"),
    Step("streams", "moves beside decode on real streams, both regimes", f"{_HERE}.check_streams:check_streams"),
    Step("graph", "captured decode under changed tables", f"{_HERE}.check_graph:check_graph"),
    Step("engine", "TorchEngine: the CPU's tokens and mass", f"{_HERE}.check_engine:check_engine"),
    Step("conformance torch", "PyTorch executor", f"{_HERE}.check_conformance:check_torch", 75),
    Step("jax decode", "JAX decode kernels against float64", f"{_HERE}.check_jax:check_decode", 75, "jax"),
    Step("conformance jax", "JAX executor", f"{_HERE}.check_conformance:check_jax", 75, "jax"),
    Step("time jax", "JAX decode kernels and move", f"{_HERE}.time_jax:time_jax", 60, "jax"),
    Step("time copy", "bandwidth ceiling and token moves", f"{_HERE}.time_moves:time_moves"),
    Step("time overlap", "moves beside matmuls, own stream", f"{_HERE}.time_moves:time_overlap"),
    Step("time decode", "decode attention against ceiling and stock kernels", f"{_HERE}.time_decode:time_decode", 90),
    Step("executors", "vtoken bench executors", f"{_HERE}.bench_executors:bench_executors", 90),
)
