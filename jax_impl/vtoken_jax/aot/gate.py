"""Judges one compiled program: spills, registers, shared memory, temporary memory, aliases, copies of the pool."""

import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from jax.errors import JaxRuntimeError

from vtoken.plugins import first_line
from vtoken_jax.aot.cases import Case
from vtoken_jax.aot.machine_code import Dump, MachineCode, join_codes
from vtoken_jax.aot.target import ARCHITECTURE, MAX_SHARED_BYTES, Target

__all__ = ["Figures", "Verdict", "figures", "judge", "reasons"]


@dataclass(frozen=True, slots=True)
class Figures:
    """What a program shows: its code, temporary memory, aliased outputs, copies of whole planes, and what it calls.

    A kernel that an earlier program called is not compiled again, and not in ``code``.
    """

    code: MachineCode
    temp_bytes: int
    aliases: int
    plane_copies: int
    calls: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Verdict:
    """Of one case; ``figures`` is None if it does not compile, ``reasons`` what is held against it."""

    case: Case
    figures: Figures | None
    reasons: tuple[str, ...]

    @property
    def passed(self) -> bool:
        """Nothing is held against it; a control is refused, for its own reason."""
        if self.case.breaks:
            return any(self.case.breaks in reason for reason in self.reasons)
        return not self.reasons

    def row(self) -> dict[str, Any]:
        """For the table that is kept: what the compiler decides alone, the same on every machine."""
        found = self.figures
        code = asdict(found.code) if found else dict.fromkeys(MachineCode.__dataclass_fields__)
        return {
            "kernel": self.case.kernel,
            "shape": self.case.shape,
            "arch": ARCHITECTURE,
            **code,
            "temp_bytes": found and found.temp_bytes,
            "aliases": found and found.aliases,
            "plane_copies": found and found.plane_copies,
            "calls": found and list(found.calls),
            "control": self.case.breaks,
            "reasons": list(self.reasons),
            "passed": self.passed,
        }


def judge(case: Case, target: Target, dump: Dump) -> Verdict:
    """Compiles a case, and holds what comes out against its bounds."""
    try:
        compiled = target.compile(lambda: case.trace(target))
    except JaxRuntimeError as error:
        dump.read()
        return Verdict(case, None, (f"does not compile: {first_line(error)}",))
    code = join_codes(dump.read())
    found = figures(compiled.as_text(), compiled.memory_analysis().temp_size_in_bytes, code, case.plane)
    return Verdict(case, found, tuple(reasons(case, found)))


def figures(program: str, temp_bytes: int, code: MachineCode, plane: tuple[int, int] | None) -> Figures:
    """From a compiled program's text."""
    header = program.split("\n", 1)[0]
    aliases = header.count("may-alias") + header.count("must-alias")
    copies = 0
    if plane is not None:
        whole = rf"= \w+\[{plane[0]},{plane[1]}\]\S* (?:copy|copy-start|convert|transpose)\("
        copies = len(re.findall(whole, program))
    calls = sorted(set(re.findall(r'custom_call_target="([^"]+)"', program)))
    return Figures(code, temp_bytes, aliases, copies, tuple(calls))


def reasons(case: Case, found: Figures) -> Iterator[str]:
    """What is wrong."""
    code = found.code
    if not code.registers:
        yield "no machine code was written down"
    if code.spills:
        yield f"{code.spills} bytes of spills"
    if code.registers > case.max_registers:
        yield f"{code.registers} registers, at most {case.max_registers}"
    if code.shared_bytes > MAX_SHARED_BYTES:
        yield f"{code.shared_bytes} bytes of shared memory, at most {MAX_SHARED_BYTES}"
    if case.tensor_core and not code.tensor_core:
        yield "no tensor-core instructions"
    if case.call and not any(case.call in call for call in found.calls):
        yield f"no call of {case.call} among {', '.join(found.calls) or 'none'}"
    if found.temp_bytes > case.max_temp_bytes:
        yield f"{found.temp_bytes} bytes of temporary memory, at most {case.max_temp_bytes}"
    if found.aliases < case.num_aliases:
        yield f"{found.aliases} aliases, expected {case.num_aliases}"
    if found.plane_copies:
        yield f"{found.plane_copies} copies of a whole KV array"
