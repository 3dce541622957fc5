"""``vtoken bench executors``: the JAX and the PyTorch executor on the same programs and the same model."""

import argparse
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vtoken.cli import Command
from vtoken.errors import SpecError
from vtoken.report import check_output, write_json
from vtoken_bench.arguments import positive

if TYPE_CHECKING:
    from vtoken_bench.executors.comparison import Comparison
    from vtoken_bench.executors.program import Side

__all__ = ["command"]

SCHEMA = "vtoken/bench-executors/1"

_DESCRIPTION = """\
Both executors get the same KV bytes and the same plans, both engines the same prompts; one operation on either in
turn. Each shape is checked first: fingerprints, attention within SPEC A-4, greedy tokens of transformers in float32. A
shape that fails is not timed.

  ratio      JAX's time over PyTorch's, round by round: median, and range
  wall ms    how long one waited for JAX / for PyTorch
  bound by   what the work cannot do without, timed in the same rounds, as a share of JAX's / of PyTorch's time:
             memcpy: one copy of the bytes that must be touched; matmul: the model's linear layers by PyTorch alone
  hf/jax     time of a step of transformers, eager attention, over the executor's, and at the end in microseconds;
  rows/jax   the same of NumPy's copy of the moves' own rows, one array after the other

Times and ratios on the CPU are of processor time of all threads, PyTorch on one; on CUDA of wall time.
"""
_DTYPES = {"f32": "float32", "bf16": "bfloat16"}
_DEFAULT_PROGRAMS = ((1, 512, "f32"), (8, 512, "f32"), (32, 512, "f32"), (8, 4096, "f32"), (8, 512, "bf16"))
_DEFAULT_DECODES = ((1, 512), (8, 512))
_MOST_DECODED = 32_768  # prompt tokens together; more would take many minutes and 20 GB on a CPU: --batch asks for it
_BATCHES, _LIVE = (1, 8, 32), (512, 4096)
_MOVES, _MOVE_BLOCKS = (16, 256, 1024), 513


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--full", action="store_true", help="batch 1, 8, 32 x live 512, 4096 x f32, bf16; decode too")
    parser.add_argument("--batch", type=positive, nargs="+", metavar="N", help="instead of the default shapes")
    parser.add_argument("--live", type=positive, nargs="+", metavar="N", help="tokens of each request, likewise")
    parser.add_argument("--dtype", choices=_DTYPES, nargs="+", help="of KV, likewise; decode is f32")
    parser.add_argument("--only", choices=("programs", "moves", "decode"), help="a part of the suite")
    parser.add_argument("--repeats", type=positive, default=9, metavar="N", help="timed rounds (%(default)s)")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="(%(default)s)")
    parser.add_argument("--model", type=Path, metavar="FOLDER", help="that decodes (SmolLM2-135M)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the record to FILE")


def _run(arguments: argparse.Namespace) -> int:
    from rich.console import Console

    from vtoken_bench.executors.comparison import comparison_table
    from vtoken_bench.record import suite_record

    check_output(arguments.json)
    begin = time.perf_counter()
    with _on_device(arguments.device):
        rows, refused = _measured(arguments)
    kind = "processor" if arguments.device == "cpu" else "wall"
    console = Console()
    console.print(
        comparison_table(f"jax and torch on {arguments.device}, {kind} time (microseconds; pool: bytes)", rows)
    )
    for line in refused:
        console.print(f"[red]not timed[/red] {line}", soft_wrap=True)
    if arguments.json:
        seconds = time.perf_counter() - begin
        summary = {"refused": refused, "device": arguments.device, "clock": kind, "seconds": seconds}
        write_json(arguments.json, suite_record(SCHEMA, rows, summary))
    return int(bool(refused))


def _shapes(arguments: argparse.Namespace) -> tuple[list[tuple[int, int, str]], list[tuple[int, int]]]:
    """Batch, live tokens and dtype of the programs; batch and live tokens of the decodes."""
    if not (arguments.full or arguments.batch or arguments.live or arguments.dtype):
        programs, decodes = list(_DEFAULT_PROGRAMS), list(_DEFAULT_DECODES)
    else:
        batches, lives = (
            given or (every if arguments.full else every[:1])
            for given, every in ((arguments.batch, _BATCHES), (arguments.live, _LIVE))
        )
        dtypes = arguments.dtype or (list(_DTYPES) if arguments.full else ["f32"])
        shapes = [(batch, live) for live in lives for batch in batches]
        programs = [(*shape, dtype) for dtype in dtypes for shape in shapes]
        decodes = [(batch, live) for batch, live in shapes if batch * live <= _MOST_DECODED or arguments.batch]
    chosen = arguments.only
    return programs if chosen in (None, "programs") else [], decodes if chosen in (None, "decode") else []


def _measured(arguments: argparse.Namespace) -> "tuple[list[Comparison], list[str]]":
    from vtoken_bench.executors.comparison import GateError, device_clock
    from vtoken_conformance.progress import progress_bar

    programs, decodes = _shapes(arguments)
    moves = list(arguments.dtype or _DTYPES) if arguments.only in (None, "moves") else []
    clock = device_clock(arguments.device)
    rows: list[Comparison] = []
    refused: list[str] = []
    with progress_bar() as progress:
        task = progress.add_task(
            "starting", total=(len(programs) + len(moves) + len(decodes)) * (arguments.repeats + 1)
        )
        advance = partial(progress.advance, task)
        models = _Models(arguments) if decodes else None
        todo: list[tuple[str, Callable[[], Sequence[Comparison]]]] = []
        for batch, live, dtype in programs:
            work = partial(_program, arguments, batch, live, dtype, clock, advance)
            todo.append((f"programs, batch {batch}, live {live}, {dtype}", work))
        todo += [(f"moves, {dtype}", partial(_moves, arguments, dtype, clock, advance)) for dtype in moves]
        if models is not None:
            todo += [
                (f"decode, batch {batch}, live {live}, f32", partial(models.compare, batch, live, clock, advance))
                for batch, live in decodes
            ]
        for label, compare in todo:
            progress.update(task, description=label)
            try:
                rows += compare()
            except GateError as error:
                refused.append(f"{label}: {error}")
    return rows, refused


def _program(
    arguments: argparse.Namespace, batch: int, live: int, dtype: str, clock: Any, advance: Any
) -> "Sequence[Comparison]":
    from vtoken_bench.executors.program import Program, compare_program, make_spec

    program = Program(make_spec(_DTYPES[dtype], batch, live), batch, live)
    params = {"batch": batch, "live": live, "dtype": dtype}
    copy = partial(_memcpy, arguments.device)
    return compare_program(
        _jax_side(), _torch_side(arguments.device), program, clock, copy, arguments.repeats, params, advance
    )


def _moves(arguments: argparse.Namespace, dtype: str, clock: Any, advance: Any) -> "Sequence[Comparison]":
    from vtoken_bench.executors.moves import compare_moves
    from vtoken_bench.executors.program import make_spec

    spec = replace(make_spec(_DTYPES[dtype], 1, 1), num_layers=30, num_blocks=_MOVE_BLOCKS)
    device = arguments.device
    return compare_moves(
        _jax_side(), _torch_side(device), spec, _MOVES, clock, partial(_memcpy, device), arguments.repeats,
        {"layers": spec.num_layers, "dtype": dtype}, device == "cpu", advance,
    )  # fmt: skip


def _jax_side() -> "Side":
    import jax

    from vtoken_bench.executors.program import Side
    from vtoken_jax.executor import JaxExecutor

    executor = JaxExecutor()

    def settle() -> None:
        jax.block_until_ready((executor.store.cache, executor.store.tables))  # type: ignore[no-untyped-call, attr-defined]

    def pool_bytes() -> int:
        return sum(leaf.nbytes for leaf in jax.tree.leaves(executor.store.cache))  # type: ignore[attr-defined]

    return Side(executor, settle, pool_bytes)


def _torch_side(device: str) -> "Side":
    import torch

    from vtoken_bench.executors.program import Side
    from vtoken_torch.executor import TorchExecutor

    executor = TorchExecutor(device)

    def settle() -> None:
        executor.store.copies.wait()  # type: ignore[attr-defined]
        if device == "cuda":
            torch.cuda.synchronize()

    def pool_bytes() -> int:
        cache = executor.store.cache  # type: ignore[attr-defined]
        return int(cache.bits.nbytes + cache.positions.nbytes)

    return Side(executor, settle, pool_bytes)


def _memcpy(device: str, num_bytes: int) -> Any:
    import torch

    source = torch.ones(num_bytes, dtype=torch.uint8, device=device)
    target = torch.zeros_like(source)  # touched, so that no page fault is timed

    def copy() -> None:
        target.copy_(source)
        if device == "cuda":
            torch.cuda.synchronize()

    return copy


class _Models:
    """One model for each engine, and one that keeps its own attention."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        import numpy as np

        from vtoken_bench.models import load_model, smollm2_folder

        self._arguments = arguments
        self._folder = arguments.model or smollm2_folder()
        self._own, self._paged = (load_model(self._folder).model.to(arguments.device) for _ in range(2))
        self._own.set_attn_implementation("eager")
        self._rng = np.random.default_rng(0)

    def compare(self, batch: int, live: int, clock: Any, advance: Any) -> "Sequence[Comparison]":
        """Decoding after prompts of ``live`` random tokens."""
        from vtoken_bench.executors.decode import compare_engines, room_to_decode
        from vtoken_jax.engine import JaxEngine
        from vtoken_torch.engine import TorchEngine

        repeats = self._arguments.repeats
        sizes: dict[str, Any] = {"max_num_seqs": batch, "max_model_len": room_to_decode(batch, live, repeats)}
        prompts = self._rng.integers(3, self._own.config.vocab_size, (batch, live)).tolist()
        jax = JaxEngine(self._folder, **sizes)
        torch = TorchEngine(self._paged, **sizes)
        try:
            params = {"batch": batch, "live": live, "dtype": "f32"}
            return [compare_engines(jax, torch, self._own, prompts, clock, repeats, params, advance)]
        finally:
            torch.release()


@contextmanager
def _on_device(device: str) -> Iterator[None]:
    """JAX on this device, PyTorch on one thread."""
    import torch

    try:
        import jax
    except ModuleNotFoundError as error:
        raise SpecError(f"this suite needs {error.name}: pip install vtoken[jax,torch]") from None
    try:
        (place, *_) = jax.devices(device)
    except RuntimeError as error:
        raise SpecError(f"--device {device}: JAX has none here: {str(error).splitlines()[0]}") from None
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with jax.default_device(place):
            yield
    finally:
        torch.set_num_threads(num_threads)


command = Command(
    help="the JAX and the PyTorch executor side by side, checked before they are timed",
    add_arguments=_add_arguments,
    run=_run,
    description=_DESCRIPTION,
    epilog="Exit codes: 0 good, 1 the executors differ somewhere (that shape is not timed), 2 bad usage.",
)
