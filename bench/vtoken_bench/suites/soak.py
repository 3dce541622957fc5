"""``vtoken bench soak``: a server under thousands of requests; leaks, preemptions, memory, beside stock vLLM."""

import argparse
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vtoken.cli import Command
from vtoken.report import check_output, write_json
from vtoken_bench.arguments import positive

if TYPE_CHECKING:
    from vtoken_bench.soak.run import Result, Soak

__all__ = ["command"]

_DESCRIPTION = """\
Starts the OpenAI server on a tiny random model with too few blocks and sends it requests of random length: most are
read to the end, a quarter is cut off, some are bad. Then the same requests go to stock vLLM, for its memory."""

_EPILOG = """\
example:
  vtoken bench soak --requests 2000 --json soak.json
exit codes: 0 good, 2 bad usage, and 1 if, with vToken,
  a request did not end as its client meant it to,
  blocks were held when no request was left,
  or the server's exit code was not 0, or a process outlived it.
Preemptions, seconds and memory, and all that stock vLLM does, are reported, not judged."""


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    for flag, default, what in (
        ("--requests", 2000, "requests"),
        ("--clients", 24, "requests at a time"),
        ("--block-size", 32, "tokens a block"),
        ("--blocks", 50, "blocks of the pool, vLLM's null block included"),
        ("--kv-budget", 95, "tokens that a request keeps, unless it says otherwise"),
        ("--interval", 16, "tokens between evictions"),
    ):
        parser.add_argument(flag, type=positive, default=default, metavar="N", help=f"{what} (%(default)s)")
    parser.add_argument("--request-seed", type=int, default=0, metavar="N", help="seed of the requests (%(default)s)")
    parser.add_argument(
        "--policy", default="streaming_llm", metavar="NAME", help="where a request names none (%(default)s)"
    )
    parser.add_argument(
        "--when", default="pressure", metavar="pressure|always", help="as in vtoken serve (%(default)s)"
    )
    parser.add_argument("--verify", action="store_true", help="check the invariants online")
    parser.add_argument("--no-stock", action="store_true", help="leave stock vLLM out")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the record to FILE")


def _run(arguments: argparse.Namespace) -> int:
    import tempfile

    from rich.console import Console

    from vtoken_bench.soak.report import make_record, soak_lines, soak_table
    from vtoken_bench.soak.run import Soak
    from vtoken_bench.tiny_model import write_tiny_model
    from vtoken_torch.vllm_plugin.flags import options_of
    from vtoken_torch.vllm_plugin.serve import vllm_serve

    check_output(arguments.json)
    settings = {name: getattr(arguments, name) for name in ("policy", "kv_budget", "interval", "when", "verify")}
    options_of(settings)
    vllm_serve()  # says so if vLLM is not there
    with tempfile.TemporaryDirectory() as folder:
        write_tiny_model(Path(folder))
        soak = Soak(
            Path(folder),
            arguments.requests,
            arguments.clients,
            arguments.block_size,
            arguments.blocks,
            arguments.request_seed,
        )
        vtoken, stock = _soaked(soak, settings, not arguments.no_stock)
    record = make_record(soak, settings, vtoken, stock)
    console = Console()
    if not console.is_terminal:
        console.width = 130
    console.print(soak_table(record))
    for line in soak_lines(record):
        console.print(line, highlight=False, soft_wrap=not console.is_terminal)
    for error in vtoken.tally.errors:
        console.print(f"error: {error}", markup=False, highlight=False, soft_wrap=True)
    if arguments.json:
        write_json(arguments.json, record)
    return int(not record["summary"]["good"])


def _soaked(soak: "Soak", settings: dict[str, Any], with_stock: bool) -> "tuple[Result, Result | None]":
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn

    from vtoken_bench.soak.run import run_soak
    from vtoken_conformance.progress import progress_bar

    columns = (TextColumn("{task.description:<10}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with progress_bar(*columns) as progress:
        servers = [("vtoken", settings), *([("stock vLLM", None)] if with_stock else [])]
        results = []
        for name, vtoken in servers:
            if progress.disable:
                tick = partial(next, _lines(name, soak.num_requests))
            else:
                tick = partial(progress.advance, progress.add_task(name, total=soak.num_requests))
            results.append(run_soak(soak, vtoken, tick))
    return results[0], results[1] if with_stock else None


def _lines(name: str, total: int) -> Iterator[None]:
    """Where no bar can be drawn, as in a pipe: a line on stderr for each tenth of a server's requests."""
    import sys
    import time

    start = time.monotonic()
    for done in range(1, total + 1):
        if done * 10 // total > (done - 1) * 10 // total:
            print(f"{name}: {done} of {total} requests, {time.monotonic() - start:.0f} s", file=sys.stderr, flush=True)
        yield


command = Command(
    help="thousands of requests to a server with too few blocks: leaks, errors, preemptions, memory",
    add_arguments=_add_arguments,
    run=_run,
    description=_DESCRIPTION,
    epilog=_EPILOG,
)
