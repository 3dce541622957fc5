"""``python -m vtoken_jax.aot``: compiles every case for an H100, prints what it shows, and fails on a missed bound."""

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from vtoken_jax.aot.machine_code import Dump, dump_environment

_SCHEMA = "vtoken/aot-jax/1"
_LINE = "{:<42} {:<32} {:>9} {:>6} {:>8} {:>4} {:>10} {:>7}  {}"


def main() -> int:
    """0: all is as it should be. 1: a bound is missed, or a control is let through."""
    parser = argparse.ArgumentParser(prog="python -m vtoken_jax.aot", description=__doc__)
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the table to FILE")
    parser.add_argument("--only", metavar="TEXT", default="", help="cases that have TEXT in 'kernel: shape'")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        os.environ.update(dump_environment(folder))  # read when JAX first runs, which is below
        record = _judge_all(folder, arguments.only)
    if arguments.json:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(record, indent=1) + "\n")
    return int(record["summary"]["failed"] > 0)


def _judge_all(folder: Path, only: str) -> dict[str, Any]:
    import jax

    from vtoken_jax.aot.cases import cases
    from vtoken_jax.aot.gate import judge
    from vtoken_jax.aot.target import Target

    target, dump = Target(), Dump(folder)
    verdicts = []
    print(_LINE.format("kernel", "shape", "registers", "spills", "shared B", "MMA", "temp B", "aliases", ""))
    for case in cases():
        if only not in f"{case.kernel}: {case.shape}":
            continue
        began = time.monotonic()
        with _quiet(folder / "stderr.log"):
            verdict = judge(case, target, dump)
        verdicts.append(verdict)
        row = verdict.row()
        shown = [row[key] for key in ("registers", "spills", "shared_bytes", "tensor_core", "temp_bytes", "aliases")]
        word = ("refused" if case.breaks else "good") if verdict.passed else "FAILED"
        note = "" if word == "good" else "; ".join(verdict.reasons) or "nothing was found"
        cells = ["-" if figure is None else figure for figure in shown]
        line = _LINE.format(case.kernel, case.shape, *cells, f"{word} ({time.monotonic() - began:.0f} s) {note}")
        print(line, flush=True)
    failed = sum(not verdict.passed for verdict in verdicts)
    print(f"{len(verdicts) - failed} of {len(verdicts)} are as they should be")
    return {
        "schema": _SCHEMA,
        "jax": jax.__version__,
        "rows": [verdict.row() for verdict in verdicts],
        "summary": {
            "kernels": len({verdict.case.kernel for verdict in verdicts if not verdict.case.breaks}),
            "compiled": len(verdicts),
            "controls": sum(verdict.case.breaks is not None for verdict in verdicts),
            "failed": failed,
        },
    }


@contextmanager
def _quiet(log: Path) -> Iterator[None]:
    """Compilers write about missing tools and cards to the process's stderr; it goes to a file meanwhile."""
    kept = os.dup(2)
    try:
        with log.open("ab") as target:
            os.dup2(target.fileno(), 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)


if __name__ == "__main__":
    sys.exit(main())
