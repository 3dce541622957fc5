"""``vtoken bench executors``: the JAX and the PyTorch executor on the same programs and the same model."""

import argparse
import json
import time
from pathlib import Path
from typing import Any

from vtoken.cli import Command
from vtoken.errors import SpecError
from vtoken.plugins import first_line
from vtoken.report import check_output, write_json
from vtoken_bench.arguments import positive
from vtoken_bench.executors.shapes import DTYPES, Chosen, choose

__all__ = ["command"]

SCHEMA = "vtoken/bench-executors/2"

_DESCRIPTION = """\
Both executors get the same KV bytes and the same plans, both engines and transformers (hf) the same KV of the same
prompts; one operation on each in turn. Each shape is checked first: fingerprints and plans, attention within SPEC A-4;
for decoding the KV that each layer writes, and the tokens, by transformers in float32. What fails is not timed.

  jax, torch     medians: processor time of all threads on the CPU, wall time on CUDA; bytes; tokens a second of wall \
time
  jax/torch      JAX's figure over PyTorch's, round by round: median, and range
  hf/jax         time of a step of transformers, eager attention, over the executor's; rows/jax: of NumPy's copy of \
the moves' own rows, one array after the other
  jax/memcpy     of moves alone: what they take beyond a call of one move, over one contiguous copy of as many bytes; \
torch/memcpy likewise
  bound by       the largest part of JAX's / of PyTorch's time, which is one of the next five
  calls          the same calls with hardly a token in them, in the same rounds
  memcpy         one copy of the bytes that must be touched, likewise
  matmul         each one's products with the model's matrices alone, likewise
  attention      twice what a step of half the context saves
  rest           what these do not explain
  decode kv      bytes of each pool, or of transformers' cache
  decode memory  how much resident memory grew with the weights, the pool and the compiled step, and what a step takes \
on top of it at its peak: what each would take in a process of its own, imports apart

Without flags a few shapes; --full is the whole grid. PyTorch and XLA have one thread each: see --threads.
"""


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--full", action="store_true", help="batch 1, 8, 32 x live 512, 4096 x f32, bf16; decode too")
    parser.add_argument("--batch", type=positive, nargs="+", metavar="N", help="instead of the default shapes")
    parser.add_argument("--live", type=positive, nargs="+", metavar="N", help="tokens of each request, likewise")
    parser.add_argument("--dtype", choices=DTYPES, nargs="+", help="of KV and weights, likewise")
    parser.add_argument("--only", choices=("programs", "moves", "decode"), help="a part of the suite")
    parser.add_argument("--repeats", type=positive, default=9, metavar="N", help="timed rounds at most (%(default)s)")
    parser.add_argument("--threads", type=positive, default=1, metavar="N", help="of each framework (%(default)s)")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="(%(default)s)")
    parser.add_argument("--model", type=Path, metavar="FOLDER", help="that decodes (SmolLM2-135M)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the record to FILE")
    parser.add_argument("--markdown", type=Path, metavar="RECORD", help="measure nothing: print a record as markdown")


def _run(arguments: argparse.Namespace) -> int:
    from rich.console import Console

    from vtoken_bench.executors.markdown import markdown_tables
    from vtoken_bench.executors.show import comparison_table

    if arguments.markdown:
        print(markdown_tables(_read_record(arguments.markdown)))
        return 0
    check_output(arguments.json)
    record = _measured(
        arguments, choose(**{key: getattr(arguments, key) for key in ("full", "batch", "live", "dtype", "only")})
    )
    summary = record["summary"]
    console = Console()
    console.print(comparison_table(f"jax and torch on {summary['device']}, {summary['clock']} time", record["rows"]))
    for key in ("refused", "skipped"):
        for line in summary[key]:
            console.print(f"[red]{key}[/red] {line}", soft_wrap=True)
    if arguments.json:
        write_json(arguments.json, record)
    return int(bool(summary["refused"]))


def _measured(arguments: argparse.Namespace, chosen: Chosen) -> dict[str, Any]:
    from vtoken_bench.record import suite_record

    try:
        from vtoken_bench.executors.grid import Grid, on_device
    except ModuleNotFoundError as error:
        raise _needs(error) from None
    begin = time.perf_counter()
    try:
        with on_device(arguments.device, arguments.threads) as threads:
            grid = Grid(arguments.device, arguments.repeats, arguments.model)
            grid.measure(chosen)
    except ModuleNotFoundError as error:
        raise _needs(error) from None
    summary = {
        "refused": grid.refused,
        "skipped": grid.skipped,
        "device": arguments.device,
        "clock": "processor" if arguments.device == "cpu" else "wall",
        "threads": threads,
        "seconds": time.perf_counter() - begin,
    }
    return suite_record(SCHEMA, grid.rows, summary)


def _needs(error: ModuleNotFoundError) -> SpecError:
    return SpecError(f"this suite needs {error.name}: pip install vtoken[jax,torch,bench]")


def _read_record(path: Path) -> dict[str, Any]:
    try:
        record: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        schema = record["schema"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise SpecError(
            f"{path} is no record of this suite: {first_line(error)}: name a file that --json wrote"
        ) from None
    if schema != SCHEMA:
        raise SpecError(f"{path} is a record of {schema}, not of {SCHEMA}: name a file that this suite wrote")
    return record


command = Command(
    help="the JAX and the PyTorch executor side by side, checked before they are timed",
    add_arguments=_add_arguments,
    run=_run,
    description=_DESCRIPTION,
    epilog="Exit codes: 0 good, 1 the executors differ somewhere (that shape is not timed), 2 bad usage.",
)
