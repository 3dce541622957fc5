"""A PyTorch engine: a transformers model, a pool, a policy, and text or tokens out."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from vtoken.errors import SpecError
from vtoken.executor import DType
from vtoken.plugins import first_line
from vtoken.serving.front import Frontend, Output
from vtoken.serving.requests import Progress
from vtoken_torch.executor import TorchExecutor
from vtoken_torch.hf.geometry import check_config
from vtoken_torch.hf.runner import HFRunner

__all__ = ["Output", "TorchEngine"]

_DTYPES = ("float32", "bfloat16", "float16")


class TorchEngine(Frontend):
    """Continuous batching of a transformers decoder: any family with full causal attention.

    Args:
        model: a folder as transformers saves it, or a loaded causal language model, whose device and dtype stay, or
            its ``HFRunner``. From here on its attention is vToken's, until ``release``.
        tokenizer: of text prompts; None takes the folder's, if it has one.
        device: of a folder's model, as PyTorch names it.
        dtype: of a folder's weights and of the pool.
        **settings: ``config`` or fields of ``VTokenConfig``, ``block_size``, ``num_blocks``, ``max_num_seqs``,
            ``max_model_len``, ``chunk_tokens``, ``prefix_caching``, ``trace``, ``on_step``: see
            ``vtoken.serving.front.Frontend``.

    Raises:
        SpecError: the model or a setting is not as it should be.
    """

    runner: HFRunner

    def __init__(
        self,
        model: Any,
        *,
        tokenizer: Any = None,
        device: str | torch.device = "cpu",
        dtype: DType = "float32",
        **settings: Any,
    ) -> None:
        if isinstance(model, str | Path):
            folder = Path(model)
            model = _load(folder, TorchExecutor(device).device, dtype)
            tokenizer = tokenizer or _folder_tokenizer(folder)
        runner = model if isinstance(model, HFRunner) else HFRunner(model)
        shape, vocab_size = runner.geometry, runner.model.get_input_embeddings().num_embeddings
        super().__init__(runner, shape.kv_spec, shape.max_positions, progress_bar, tokenizer, vocab_size, **settings)

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Tokens with which the model ends a text: for ``SamplingParams.stop_token_ids``."""
        ids = self.runner.model.generation_config.eos_token_id
        return () if ids is None else (ids,) if isinstance(ids, int) else tuple(ids)

    def release(self) -> None:
        """Gives a loaded model its own attention back; the engine is of no use from then on."""
        self.runner.release()


def _load(folder: Path, device: torch.device, dtype: DType) -> Any:
    if dtype not in _DTYPES:
        raise SpecError(f"dtype={dtype!r}: choose one of {', '.join(_DTYPES)}")
    if not (folder / "config.json").is_file():
        raise SpecError(f"no model folder: {folder} has no config.json: give one that save_pretrained wrote")
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # whatever a damaged folder makes transformers raise
        raise SpecError(f"{folder / 'config.json'}: {first_line(error)}: mend it") from error
    check_config(config)  # before the weights are read
    try:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, local_files_only=True)
    except Exception as error:
        raise SpecError(f"model folder {folder} does not load: {first_line(error)}: delete or mend it") from error
    return model.to(device)


def _folder_tokenizer(folder: Path) -> Any:
    """None where the folder has none: token prompts need none."""
    if not any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json")):
        return None
    return AutoTokenizer.from_pretrained(folder, local_files_only=True)


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
