"""Measures the shapes that were chosen, one after the other: what is refused or skipped does not stop the others."""

import gc
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

from vtoken.errors import SpecError
from vtoken_bench.executors.comparison import Clock, Comparison, GateError, device_clock
from vtoken_bench.executors.decode import compare_decoding
from vtoken_bench.executors.memory import available_bytes
from vtoken_bench.executors.models import Models
from vtoken_bench.executors.moves import compare_moves
from vtoken_bench.executors.program import Program, compare_program, make_spec
from vtoken_bench.executors.prompts import Prompts
from vtoken_bench.executors.room import NoRoom, decode_shape
from vtoken_bench.executors.shapes import DTYPES, Chosen, Shape
from vtoken_bench.executors.sides import jax_side, memcpy, torch_side
from vtoken_bench.models import smollm2_folder
from vtoken_conformance.progress import progress_bar

__all__ = ["Grid", "on_device"]

_MOVES, _MOVE_BLOCKS, _MOVE_LAYERS = (16, 256, 1024), 513, 30


class Grid:
    """Rows of all shapes.

    Attributes:
        rows: what was measured.
        refused: shapes at which the executors differ, with where.
        skipped: shapes that do not fit the machine, with why.
    """

    def __init__(self, device: str, repeats: int, model: Path | None) -> None:
        self.rows: list[Comparison] = []
        self.refused: list[str] = []
        self.skipped: list[str] = []
        self._device, self._repeats = device, repeats
        self._clock = device_clock(device)
        self._decodes = _Decodes(device, model)

    def measure(self, chosen: Chosen) -> None:
        """All of them, behind a progress bar."""
        todo: list[tuple[str, Callable[..., Sequence[Comparison]]]] = []
        todo += [(f"programs, {shape}", partial(self._program, shape)) for shape in chosen.programs]
        todo += [(f"moves, {dtype}", partial(self._moves, dtype)) for dtype in chosen.moves]
        todo += [(f"decode, {shape}", partial(self._decode, shape)) for shape in chosen.decodes]
        with progress_bar() as progress:
            task = progress.add_task("starting", total=len(todo))
            for at, (label, compare) in enumerate(todo):
                progress.update(task, description=label, completed=at)
                self._keep(label, partial(compare, partial(progress.advance, task, 1 / (self._repeats + 1))))

    def _keep(self, label: str, compare: Callable[[], Sequence[Comparison]]) -> None:
        try:
            self.rows += compare()
        except GateError as error:
            self.refused.append(f"{label}: {error}")
        except NoRoom as error:
            self.skipped.append(f"{label}: {error}")
        gc.collect()

    def _program(self, shape: Shape, on_round: Callable[[], object]) -> Sequence[Comparison]:
        program = Program(make_spec(DTYPES[shape.dtype], shape.batch, shape.live), shape.batch, shape.live)
        sides, copy = (jax_side(), torch_side(self._device)), partial(memcpy, self._device)
        return compare_program(*sides, program, self._clock, copy, self._repeats, shape._asdict(), on_round)

    def _moves(self, dtype: str, on_round: Callable[[], object]) -> Sequence[Comparison]:
        spec = replace(make_spec(DTYPES[dtype], 1, 1), num_layers=_MOVE_LAYERS, num_blocks=_MOVE_BLOCKS)
        sides, copy = (jax_side(), torch_side(self._device)), partial(memcpy, self._device)
        params, with_rows = {"layers": spec.num_layers, "dtype": dtype}, self._device == "cpu"
        return compare_moves(*sides, spec, _MOVES, self._clock, copy, self._repeats, params, with_rows, on_round)

    def _decode(self, shape: Shape, on_round: Callable[[], object]) -> Sequence[Comparison]:
        return self._decodes.compare(shape, self._clock, self._repeats, on_round)


class _Decodes:
    """Keeps the models of one dtype, and the prompts of all lengths."""

    def __init__(self, device: str, folder: Path | None) -> None:
        self._device, self._folder = device, folder
        self._models: Models | None = None
        self._prompts: dict[int, Prompts] = {}

    def compare(self, shape: Shape, clock: Clock, repeats: int, on_round: Callable[[], object]) -> Sequence[Comparison]:
        if self._models is None or self._models.dtype != DTYPES[shape.dtype]:
            self._models = None  # before the others come
            gc.collect()
            self._models = Models(self._folder or smollm2_folder(), DTYPES[shape.dtype], self._device)
        models = self._models
        fitting = decode_shape(
            shape.batch, shape.live, models.token_bytes, available_bytes() if self._device == "cpu" else None
        )
        if shape.live not in self._prompts:
            self._prompts[shape.live] = Prompts(shape.live, models.own.config.vocab_size)
        prompts = self._prompts[shape.live]
        return compare_decoding(models, prompts, fitting, clock, repeats, shape._asdict(), on_round)


@contextmanager
def on_device(device: str, threads: int) -> Iterator[dict[str, int | None]]:
    """JAX on this device, both frameworks with this many threads; gives the threads of each, None where not known.

    XLA reads its own at its first use in a process, so that it has what it has if JAX runs already.
    """
    import torch

    of_xla = None if "jax" in sys.modules else threads
    if of_xla is not None:
        os.environ["NPROC"] = str(threads)
    import jax

    try:
        (place, *_) = jax.devices(device)
    except RuntimeError as error:
        raise SpecError(f"--device {device}: JAX has none here: {str(error).splitlines()[0]}") from None
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        with jax.default_device(place):
            yield {"torch": threads, "xla": of_xla}
    finally:
        torch.set_num_threads(before)
