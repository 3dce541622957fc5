"""``vtoken bench kernels``: what the Triton kernels compile to for cards that need not be there."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vtoken.cli import Command
from vtoken.errors import SpecError
from vtoken.report import check_output, write_json
from vtoken_bench.arguments import positive

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from rich.table import Table

    from vtoken_torch.kernels.aot import MachineCode, Verdict

__all__ = ["command"]

SCHEMA = "vtoken/bench-kernels/1"

_DESCRIPTION = """\
Compiles every kernel for sm_80, sm_90 and sm_100 at the shapes that its file names, and reads the machine code: no
spills, registers and shared memory within bounds, 128-bit loads and stores of KV, tensor-core instructions where there
are matrices. Needs no card and says nothing of speed. Negative controls are spoilt on purpose, and have to be refused.

  regs      registers of a thread
  spill     instructions that go to the stack because registers ran out
  KiB       shared memory of a block
  load      instructions that load 128 bits a thread from global memory; store likewise
  narrow    loads and stores of global memory below 32 bits
  MMA       tensor-core instructions
"""
_FIGURES = ("registers", "spills", "shared_bytes", "wide_loads", "wide_stores", "narrow", "tensor_core")


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--only", metavar="TEXT", help="cases that have TEXT in 'kernel: shape'")
    parser.add_argument("--processes", type=positive, default=2, metavar="N", help="that compile (%(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the record to FILE")


def _run(arguments: argparse.Namespace) -> int:
    from rich.console import Console

    from vtoken_conformance.progress import progress_bar

    try:
        from vtoken_torch.kernels.aot import ARCHITECTURES, aot_cases, judge_all
    except ModuleNotFoundError as error:
        if error.name != "triton":
            raise
        raise SpecError(str(error)) from None  # it says what to install: no extra of vToken's brings it
    check_output(arguments.json)
    cases = aot_cases()
    keys = [key for key in cases if arguments.only is None or arguments.only in key]
    if not keys:
        raise SpecError(f"--only {arguments.only}: no case has that in its name; there are {', '.join(cases)}")
    verdicts: list[Verdict] = []
    with progress_bar() as progress:
        task = progress.add_task("starting", total=len(keys) * len(ARCHITECTURES))
        for verdict in judge_all(keys, arguments.processes):
            verdicts.append(verdict)
            progress.update(task, advance=1, description=f"{verdict.kernel} sm_{verdict.arch}")
    console = Console()
    for kernel in sorted({verdict.kernel for verdict in verdicts}):
        console.print(_table(kernel, [verdict for verdict in verdicts if verdict.kernel == kernel]))
    for line in _findings(verdicts):
        console.print(line, highlight=False, markup=False, soft_wrap=True)
    record = _record(verdicts)
    if arguments.json:
        write_json(arguments.json, record)
    return int(record["summary"]["failed"] > 0)


def _table(kernel: str, verdicts: "Sequence[Verdict]") -> "Table":
    """A line for each shape. Registers stand in the order of the architectures; of other figures there is the worst."""
    from rich.box import SIMPLE
    from rich.table import Table

    archs = " / ".join(f"sm_{arch}" for arch in sorted({verdict.arch for verdict in verdicts}))
    table = Table(title=f"{kernel}, {archs}", title_justify="left", box=SIMPLE, pad_edge=False, padding=0)
    table.add_column("shape", no_wrap=True)
    for name in ("regs", "spill", "KiB", "load", "store", "narrow", "MMA"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    for shape in dict.fromkeys(verdict.shape for verdict in verdicts):
        same = [verdict for verdict in verdicts if verdict.shape == shape]
        codes = [verdict.code for verdict in same if verdict.code is not None]
        passed = all(verdict.passed for verdict in same)
        word = ("refused" if same[0].control else "good") if passed else "[red]FAILED[/red]"
        table.add_row(shape, *(_figures(codes) if codes else "-" * len(_FIGURES)), word)
    return table


def _figures(codes: "Sequence[MachineCode]") -> list[str]:
    registers = [str(code.registers) for code in codes]
    return [
        "/".join(registers if len(set(registers)) > 1 else registers[:1]),
        str(max(code.spills for code in codes)),
        f"{max(code.shared_bytes for code in codes) / 1024:.1f}",
        str(min(code.wide_loads for code in codes)),
        str(min(code.wide_stores for code in codes)),
        str(max(code.narrow for code in codes)),
        str(min(code.tensor_core for code in codes)),
    ]


def _findings(verdicts: "Sequence[Verdict]") -> "Iterator[str]":
    """What failed and why; then how many did."""
    failed = [verdict for verdict in verdicts if not verdict.passed]
    for verdict in failed:
        what = f"{verdict.kernel}: {verdict.shape} on sm_{verdict.arch}"
        if verdict.control:
            found = "; ".join(verdict.reasons) or "nothing"
            yield f"{what}: a negative control, to be refused for {verdict.control!r}; found: {found}"
        else:
            yield f"{what}: {'; '.join(verdict.reasons)}"
    yield f"{len(verdicts) - len(failed)} of {len(verdicts)} are as they should be"


def _record(verdicts: "Sequence[Verdict]") -> dict[str, Any]:
    """No environment but the compiler's version: the same everywhere, so that it can be kept beside the code."""
    import triton

    return {
        "schema": SCHEMA,
        "triton": triton.__version__,
        "rows": [_row(verdict) for verdict in verdicts],
        "summary": {
            "kernels": len({verdict.kernel for verdict in verdicts}),
            "compiled": len(verdicts),
            "controls": sum(verdict.control is not None for verdict in verdicts),
            "failed": sum(not verdict.passed for verdict in verdicts),
        },
    }


def _row(verdict: "Verdict") -> dict[str, Any]:
    return {
        "kernel": verdict.kernel,
        "shape": verdict.shape,
        "arch": f"sm_{verdict.arch}",
        **{name: getattr(verdict.code, name, None) for name in _FIGURES},
        "control": verdict.control,
        "reasons": list(verdict.reasons),
        "passed": verdict.passed,
    }


command = Command(
    help="compiles the Triton kernels for three generations of cards and judges the machine code",
    add_arguments=_add_arguments,
    run=_run,
    description=_DESCRIPTION,
    epilog="Exit codes: 0 good, 1 a kernel misses a bound or a control is let through, 2 bad usage.",
)
