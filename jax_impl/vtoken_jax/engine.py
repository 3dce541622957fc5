"""A JAX engine: a model folder, a pool, a policy, and text or tokens out."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import jax
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

from vtoken.errors import SpecError
from vtoken.executor import DType
from vtoken.plugins import first_line
from vtoken.serving.front import Frontend, Output
from vtoken.serving.requests import Progress
from vtoken_jax.runner import JaxRunner
from vtoken_jax.snapshot import load_snapshot, save_snapshot

__all__ = ["JaxEngine", "Output"]


class JaxEngine(Frontend):
    """Continuous batching of one Llama-family model on one device.

    Args:
        model: a Hugging Face folder, or a ``JaxRunner`` that is nobody else's, whose dtype and device stay.
        tokenizer: of text prompts; None takes the folder's ``tokenizer.json``, if it has one.
        dtype: of a folder's weights and of the pool. On CPUs float32 is the fast one.
        device: of a folder's model, one of ``jax.devices()``; None is JAX's default.
        **settings: ``config`` or fields of ``VTokenConfig``, ``block_size``, ``num_blocks``, ``max_num_seqs``,
            ``max_model_len``, ``chunk_tokens``, ``prefix_caching``, ``trace``, ``on_step``: see
            ``vtoken.serving.front.Frontend``.

    Raises:
        SpecError: the folder or a setting is not as it should be.
    """

    runner: JaxRunner

    def __init__(
        self,
        model: str | Path | JaxRunner,
        *,
        tokenizer: Any = None,
        dtype: DType = "float32",
        device: jax.Device | None = None,
        **settings: Any,
    ) -> None:
        if not isinstance(model, JaxRunner):
            tokenizer = _folder_tokenizer(Path(model)) if tokenizer is None else tokenizer
            model = JaxRunner.from_folder(Path(model), dtype, device=device)
        config, make_spec = model.config, partial(model.config.kv_spec, dtype=model.dtype)
        super().__init__(model, make_spec, config.max_positions, progress_bar, tokenizer, config.vocab_size, **settings)
        model.limit_positions(self.max_model_len)

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Tokens with which the model ends a text: for ``SamplingParams.stop_token_ids``."""
        return self.runner.eos_token_ids

    def resume(self) -> list[Output]:
        """Serves all that run or wait, those of a snapshot among them; ``index`` is that of their submission."""
        requests = self.loop.requests
        while not self.loop.is_idle:
            self.step()
        return [self._output(request.index, request.prompt, request.as_output()) for request in requests]

    def save_snapshot(self, folder: str | Path) -> None:
        """Writes all that the next step depends on, the model's weights apart: see ``vtoken_jax.snapshot``.

        Raises SpecError if the folder exists, or cannot be written.
        """
        save_snapshot(Path(folder), self)

    def load_snapshot(self, folder: str | Path) -> None:
        """Goes on where a snapshot was taken; what runs here is dropped.

        Raises:
            SpecError: there is none, or it is torn, of another format, or of an engine with another model, other
                weights, another pool or configuration; this engine goes on as it was.
        """
        load_snapshot(Path(folder), self)


def _folder_tokenizer(folder: Path) -> Any:
    """None where the folder has none: token prompts need none."""
    path = folder / "tokenizer.json"
    if not path.is_file():
        return None
    from tokenizers import Tokenizer

    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # it has no exception of its own
        raise SpecError(f"{path} does not load: {first_line(error)}: delete or mend it") from error


@contextmanager
def progress_bar(is_wanted: bool) -> Iterator[Callable[[Progress], None]]:
    """A bar of output tokens on stderr that goes when its work is done; nothing if stderr is no terminal."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Bar(*columns, console=console, transient=True, disable=not (is_wanted and console.is_terminal)) as bar:
        task = bar.add_task("tokens", total=None)

        def advance(now: Progress) -> None:
            about = f"{now.num_finished}/{now.num_requests} requests"
            bar.update(task, description=about, total=now.max_output_tokens, completed=now.num_output_tokens)

        yield advance
