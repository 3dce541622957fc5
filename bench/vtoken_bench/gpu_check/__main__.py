"""``python -m vtoken_bench.gpu_check``: see ``scripts/gpu_check.sh``."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from rich.console import Console

from vtoken.report import write_bytes, write_json
from vtoken_bench.gpu_check.conduct import conduct
from vtoken_bench.gpu_check.report import gpu_names, make_record, make_table
from vtoken_bench.gpu_check.step import STEPS, Step
from vtoken_bench.gpu_check.worker import Outcome

__all__ = ["main"]

_NO_GPU = 2


def main(arguments: Sequence[str] | None = None) -> int:
    """0: good, 1: a step went wrong, 2: no GPU."""
    parser = argparse.ArgumentParser(prog="gpu_check.sh", description="Checks vToken on one NVIDIA GPU, then times it.")
    parser.add_argument("--dry-run", action="store_true", help="walk through every step on the CPU; measures nothing")
    parser.add_argument(
        "--step",
        action="append",
        choices=[step.name for step in STEPS],
        metavar="NAME",
        help=f"only this; may be repeated: {', '.join(step.name for step in STEPS)}",
    )
    parser.add_argument("--out", type=Path, required=True, help="folder for check.json and check.txt")
    options = parser.parse_args(arguments)
    steps = [step for step in STEPS if options.step is None or step.name in options.step]
    if options.dry_run:
        return _dry_run(steps)
    missing = missing_gpu()
    if missing is not None:
        print(f"gpu_check: {missing}", file=sys.stderr)
        return _NO_GPU
    outcomes = _run(steps, is_dry=False)
    table = make_table(f"vToken on {', '.join(gpu_names())}", outcomes)
    Console().print(table)
    name = "check" if options.step is None else "partial"
    options.out.mkdir(parents=True, exist_ok=True)
    write_json(options.out / f"{name}.json", make_record(outcomes))
    plain = Console(width=140, force_terminal=False, no_color=True)
    with plain.capture() as text:
        plain.print(table)
    write_bytes(options.out / f"{name}.txt", text.get().encode())
    return int(any(outcome.is_bad for outcome in outcomes))


def missing_gpu() -> str | None:
    """What stands in the way of a run, and the remedy."""
    import torch

    if torch.version.cuda is None:
        return (
            "PyTorch here is built without CUDA: on a machine with an NVIDIA GPU remove .venv and run "
            "VTOKEN_DEVICE=cuda bash scripts/setup.sh; without one, scripts/gpu_check.sh --dry-run"
        )
    if not torch.cuda.is_available():
        return (
            "CUDA finds no GPU: see whether nvidia-smi does and its driver is recent enough for CUDA "
            f"{torch.version.cuda}; without a GPU, scripts/gpu_check.sh --dry-run"
        )
    return None


def _dry_run(steps: Sequence[Step]) -> int:
    outcomes = _run(steps, is_dry=True)
    Console().print(make_table("Dry run on the CPU: nothing was measured", outcomes))
    rehearsed = [outcome.step.name for outcome in outcomes if outcome.status == "rehearsed"]
    print(
        f"gpu_check: rehearsed on the CPU with tiny shapes: {', '.join(rehearsed) or 'nothing'}; nothing was measured"
    )
    return int(any(outcome.is_bad for outcome in outcomes))


def _run(steps: Sequence[Step], *, is_dry: bool) -> list[Outcome]:
    outcomes = []
    with TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        for outcome in conduct(steps, is_dry, log):
            outcomes.append(outcome)
            print(f"gpu_check: {outcome.step.name}: {outcome.status}", file=sys.stderr, flush=True)
        _print_tracebacks(log)
    return outcomes


def _print_tracebacks(log: Path) -> None:
    text = log.read_text(errors="replace") if log.exists() else ""
    if "Traceback" in text:
        print(text[text.index("Traceback") :][-6000:], file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
