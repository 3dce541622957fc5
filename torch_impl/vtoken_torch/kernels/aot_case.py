"""What the AOT gate compiles: one kernel at one shape, and what its machine code must show."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Self

__all__ = ["AOTCase"]


@dataclass(frozen=True, slots=True)
class AOTCase:
    """One kernel at one shape. Each kernel's file exports its cases as ``AOT_CASES: tuple[AOTCase, ...]``.

    Attributes:
        kernel: the function under ``triton.jit``.
        shape: a label of at most 24 characters, unique for a kernel: ``bf16 32/8 D128 BS16``.
        signature: type of each argument that is no constexpr: ``{"q": "*bf16", "scale": "fp32", "stride": "i32"}``.
        constexprs: value of each constexpr.
        divisible_by_16: arguments that are multiples of 16, as the JIT finds at run time: pointers, strides.
        num_warps, num_stages: as the launch passes them.
        max_registers: of a thread.
        wide_loads, wide_stores: 128-bit accesses of global memory must be there.
        narrow_limit: accesses of global memory below 32 bits that the code may have; None: not looked at.
        tensor_core: tensor-core instructions must be there.
        max_shared_bytes: of a block; None: what the architecture has.
        breaks: of a negative control: the gate must refuse it, for a reason that contains this. None: it must pass.
    """

    kernel: Any
    shape: str
    signature: Mapping[str, str]
    constexprs: Mapping[str, Any]
    divisible_by_16: tuple[str, ...] = ()
    num_warps: int = 4
    num_stages: int = 3
    max_registers: int = 128
    wide_loads: bool = True
    wide_stores: bool = True
    narrow_limit: int | None = 0
    tensor_core: bool = False
    max_shared_bytes: int | None = None
    breaks: str | None = None

    @property
    def name(self) -> str:
        """The kernel's name: ``move_kernel``."""
        name: str = self.kernel.fn.__name__
        return name

    def control(self, shape: str, breaks: str, **constexprs: Any) -> Self:
        """A negative control: the same but for some constexprs, which the gate must see."""
        return replace(self, shape=shape, breaks=breaks, constexprs={**self.constexprs, **constexprs})
