"""The AOT gate: compiles the kernels for cards that are not there, and reads what the machine code shows.

Triton compiles for any architecture, and its wheel brings the disassembler. What is read is SASS, the code that a card
runs: registers, stack, spills, the width of its accesses, tensor-core instructions. Shared memory is compared with the
architecture's here, for Triton does so only when it loads a kernel onto a card.
"""

import importlib
import multiprocessing
import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, CompilationError
from triton.runtime.errors import PTXASError

from vtoken.errors import InvariantError
from vtoken.plugins import first_line
from vtoken_torch.kernels.aot_case import AOTCase

__all__ = ["ARCHITECTURES", "MachineCode", "Verdict", "aot_cases", "judge", "judge_all", "read_code", "reasons"]

ARCHITECTURES: Final[Mapping[int, int]] = {80: 166_912, 90: 232_448, 100: 232_448}
"""Compute capability (A100, H100, B200) and the bytes of shared memory that a block can have there."""

_MODULES: Final = ("decode_aot", "fingerprint", "move")
_INSTRUCTION: Final = re.compile(r"^\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)", re.MULTILINE)
_USAGE: Final = re.compile(r"REG:(\d+) STACK:(\d+)")
_TENSOR_CORE: Final = "(UTC)?[HIQO]G?MMA"
_LOADS: Final = {"LDG", "LDGSTS"}
_STORES: Final = {"STG"}
_WIDE: Final = {"128", "256"}
_NARROW: Final = {"U8", "S8", "U16", "S16", "8", "16"}


@dataclass(frozen=True, slots=True)
class MachineCode:
    """What one kernel compiles to. Of instructions: how many the code has, not how often they run.

    Attributes:
        registers: of a thread.
        stack_bytes: of a thread, in global memory.
        spills: instructions that store to, or load from, the stack.
        shared_bytes: of a block.
        wide_loads, wide_stores: of global memory, 128 bits or more for each thread.
        narrow: loads and stores of global memory below 32 bits.
        tensor_core: matrix instructions.
    """

    registers: int
    stack_bytes: int
    spills: int
    shared_bytes: int
    wide_loads: int
    wide_stores: int
    narrow: int
    tensor_core: int


@dataclass(frozen=True, slots=True)
class Verdict:
    """Of one case on one architecture.

    Attributes:
        code: None if it does not compile.
        reasons: what the gate holds against it.
        control: of a negative control, what the reasons must name.
    """

    kernel: str
    shape: str
    arch: int
    code: MachineCode | None
    reasons: tuple[str, ...]
    control: str | None

    @property
    def passed(self) -> bool:
        """Nothing is held against it; a control is refused, for its own reason."""
        return any(self.control in reason for reason in self.reasons) if self.control else not self.reasons


def aot_cases() -> dict[str, AOTCase]:
    """All cases by name and shape, ``move_kernel: NHD 8x512 B``."""
    cases: dict[str, AOTCase] = {}
    for module in _MODULES:
        for case in importlib.import_module(f"vtoken_torch.kernels.{module}").AOT_CASES:
            key = f"{case.name}: {case.shape}"
            if key in cases:
                raise InvariantError(f"two AOT cases are called {key!r}")
            cases[key] = case
    return cases


def judge_all(keys: Iterable[str], num_processes: int) -> Iterator[Verdict]:
    """Judges cases of ``aot_cases`` on all architectures, in order: the verdicts of one case follow one another."""
    todo = [(key, arch) for key in keys for arch in ARCHITECTURES]
    with multiprocessing.get_context("spawn").Pool(num_processes) as pool:
        yield from pool.imap(_judge, todo)


def _judge(todo: tuple[str, int]) -> Verdict:
    key, arch = todo
    return judge(aot_cases()[key], arch)


def judge(case: AOTCase, arch: int) -> Verdict:
    """Compiles a case for one architecture, and holds the code against what the case expects."""
    try:
        code = _compile(case, arch)
    except (CompilationError, PTXASError) as error:
        return Verdict(case.name, case.shape, arch, None, (f"does not compile: {first_line(error)}",), case.breaks)
    return Verdict(case.name, case.shape, arch, code, tuple(reasons(case, arch, code)), case.breaks)


def reasons(case: AOTCase, arch: int, code: MachineCode) -> Iterator[str]:
    """What is wrong with the code."""
    max_shared = min(ARCHITECTURES[arch], case.max_shared_bytes or ARCHITECTURES[arch])
    if code.registers > case.max_registers:
        yield f"{code.registers} registers, at most {case.max_registers}"
    if code.spills or code.stack_bytes:
        yield f"{code.spills} spills, {code.stack_bytes} bytes of stack"
    if code.shared_bytes > max_shared:
        yield f"{code.shared_bytes} bytes of shared memory, at most {max_shared}"
    if case.wide_loads and not code.wide_loads:
        yield "no 128-bit loads"
    if case.wide_stores and not code.wide_stores:
        yield "no 128-bit stores"
    if case.narrow_limit is not None and code.narrow > case.narrow_limit:
        yield f"{code.narrow} narrow accesses, at most {case.narrow_limit}"
    if case.tensor_core and not code.tensor_core:
        yield "no tensor-core instructions"


def read_code(listing: str, shared_bytes: int) -> MachineCode:
    """Of a listing by ``cuobjdump -sass -res-usage``, which is of one kernel."""
    usage = _USAGE.search(listing)
    codes = Counter(_INSTRUCTION.findall(listing))
    if usage is None or not codes:
        raise InvariantError(f"cuobjdump lists no kernel: {first_line(ValueError(listing))}")

    def count(names: set[str], widths: set[str]) -> int:
        parts = ((code.split("."), number) for code, number in codes.items())
        return sum(number for (name, *suffixes), number in parts if name in names and widths & set(suffixes))

    def named(pattern: str) -> int:
        return sum(number for code, number in codes.items() if re.fullmatch(pattern, code.partition(".")[0]))

    return MachineCode(
        registers=int(usage[1]),
        stack_bytes=int(usage[2]),
        spills=named("STL|LDL"),
        shared_bytes=shared_bytes,
        wide_loads=count(_LOADS, _WIDE),
        wide_stores=count(_STORES, _WIDE),
        narrow=count(_LOADS | _STORES, _NARROW),
        tensor_core=named(_TENSOR_CORE),
    )


def _compile(case: AOTCase, arch: int) -> MachineCode:
    options = {"num_warps": case.num_warps, "num_stages": case.num_stages, "enable_fp_fusion": True}
    compiled = triton.compile(_source(case), target=GPUTarget("cuda", arch, 32), options=options)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        tool = triton.knobs.nvidia.cuobjdump.path
        done = subprocess.run([tool, "-sass", "-res-usage", file.name], capture_output=True, text=True, check=True)
    return read_code(done.stdout, compiled.metadata.shared)


def _source(case: AOTCase) -> Any:
    """What the JIT would compile for these arguments."""
    names = case.kernel.arg_names
    types = {name: "constexpr" if name in case.constexprs else case.signature[name] for name in names}
    values = {(names.index(name),): value for name, value in case.constexprs.items()}
    hints = {(names.index(name),): [["tt.divisibility", 16]] for name in case.divisible_by_16}
    return ASTSource(case.kernel, types, constexprs=values, attrs=hints)
