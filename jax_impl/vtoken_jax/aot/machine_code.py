"""Reads what was compiled: registers, spills, shared memory and tensor-core instructions of every kernel of a program.

XLA and Mosaic are told to write down PTX. NVIDIA's assembler, which Triton's wheel brings, says what becomes of it.
"""

import os
import re
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from vtoken.errors import InvariantError
from vtoken_jax.aot.target import ARCHITECTURE

__all__ = ["Dump", "MachineCode", "dump_environment", "join_codes", "read_listings"]

_ENTRY: Final = re.compile(r"^\s*\.visible \.entry (\w+)", re.MULTILINE)
_USED: Final = re.compile(r"Used (\d+) registers")
_SPILLS: Final = re.compile(r"(\d+) bytes spill stores, (\d+) bytes spill loads")
_STATIC_SHARED: Final = re.compile(r"(\d+) bytes smem")
_TENSOR_CORE: Final = re.compile(r"\b(?:mma\.sync|wgmma\.mma_async|tcgen05\.mma)\b")
_LAUNCH: Final = re.compile(r"(\w+) grid: .* shared_memory: (\d+) bytes")
_MOSAIC_SHARED: Final = re.compile(r"smem_scratch_bytes=(\d+)")


@dataclass(frozen=True, slots=True)
class MachineCode:
    """Of one kernel, or of the worst in each respect of a program's kernels.

    Attributes:
        registers: of a thread.
        spills: bytes that a thread stores to and loads from its stack.
        shared_bytes: of a block.
        tensor_core: matrix instructions that the PTX has.
    """

    registers: int
    spills: int
    shared_bytes: int
    tensor_core: int


def dump_environment(folder: Path) -> Mapping[str, str]:
    """Environment variables that make XLA and Mosaic write what ``Dump`` reads; to be set before JAX runs."""
    return {
        "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1",
        "JAX_PLATFORMS": "cpu",
        "MOSAIC_GPU_DUMP_TO": str(folder),
        "XLA_FLAGS": f"--xla_dump_to={folder} --xla_dump_emitter_re=ptx|asm",
    }


class Dump:
    """The folder that compilers write to. Each call of ``read`` gives what has come since the last."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._seen: set[Path] = set()

    def read(self) -> dict[str, MachineCode]:
        """Machine code by kernel name."""
        fresh = sorted(set(self._folder.iterdir()) - self._seen)
        self._seen.update(fresh)
        shared: dict[str, int] = {}
        for path in fresh:
            if path.name.endswith("thunk_sequence.txt"):
                shared |= {name: int(size) for name, size in _LAUNCH.findall(path.read_text())}
            elif path.name.endswith(".resources.txt"):
                found = _MOSAIC_SHARED.search(path.read_text())
                shared[path.name.split(".")[0]] = int(found[1]) if found else 0
        codes: dict[str, MachineCode] = {}
        for path in fresh:
            if path.suffix == ".ptx":
                codes |= _read_ptx(path, shared)
        return codes


def _read_ptx(path: Path, shared: Mapping[str, int]) -> dict[str, MachineCode]:
    text = path.read_text()
    names = _ENTRY.findall(text)
    if not names:  # constants alone
        return {}
    if len(names) > 1:
        raise InvariantError(f"{path.name} has {len(names)} kernels, expected one")
    # The newer of the wheel's two assemblers; it knows older cards too, and the version of PTX that XLA writes.
    usage = _run("ptxas-blackwell", "-v", f"-arch={ARCHITECTURE}", str(path), "-o", os.devnull)
    dynamic = shared.get(names[0], shared.get(path.stem, 0))
    return {names[0]: read_listings(text, usage, dynamic)}


def read_listings(ptx: str, usage: str, dynamic_shared_bytes: int) -> MachineCode:
    """From the PTX of one kernel, and what ``ptxas -v`` says of it.

    Raises:
        InvariantError: it says nothing of registers or spills.
    """
    used, spilled = _USED.search(usage), _SPILLS.search(usage)
    if used is None or spilled is None:
        raise InvariantError(f"no kernel in what ptxas says: {usage[-500:]}")
    static = _STATIC_SHARED.search(usage)
    return MachineCode(
        registers=int(used[1]),
        spills=int(spilled[1]) + int(spilled[2]),
        shared_bytes=dynamic_shared_bytes + (int(static[1]) if static else 0),
        tensor_core=len(_TENSOR_CORE.findall(ptx)),
    )


def join_codes(codes: Mapping[str, MachineCode]) -> MachineCode:
    """The most that any kernel takes; tensor-core instructions are summed."""
    return MachineCode(
        registers=max((code.registers for code in codes.values()), default=0),
        spills=max((code.spills for code in codes.values()), default=0),
        shared_bytes=max((code.shared_bytes for code in codes.values()), default=0),
        tensor_core=sum(code.tensor_core for code in codes.values()),
    )


def _run(tool: str, *arguments: str) -> str:
    spec = find_spec("triton")
    if spec is None or spec.origin is None:
        raise InvariantError("no triton here, whose wheel brings ptxas")
    path = Path(spec.origin).parent / "backends" / "nvidia" / "bin" / tool
    done = subprocess.run([path, *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        raise InvariantError(f"{tool} failed: {done.stderr[-500:]}")
    return done.stdout + done.stderr
