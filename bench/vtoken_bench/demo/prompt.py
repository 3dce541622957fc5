"""The prompt: the source of a module that ships with Python, or a text file."""

import heapq
import inspect
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

from vtoken.errors import SpecError
from vtoken_bench.models import LoadedModel

__all__ = ["BUILT_IN", "read_prompt"]

BUILT_IN: ModuleType = heapq
"""Prose and code of some 6,500 tokens; the same on every machine with the same Python."""

DEFAULT_TOKENS = 2000


def read_prompt(
    model: LoadedModel, file: Path | None, max_tokens: int | None, num_tokens: int
) -> tuple[str, Sequence[int]]:
    """The prompt's name and its tokens: at most ``max_tokens`` of them, all of a file if None.

    Raises:
        SpecError: the file is missing, empty or no text; the prompt is too short for ``max_tokens``, or too long for
            the model together with the ``num_tokens`` that follow.
    """
    name, text = (file.name, _read(file)) if file else (f"{BUILT_IN.__name__}.py", _built_in_source())
    ids: Sequence[int] = model.tokenizer(text, verbose=False)["input_ids"]
    if not text.strip() or not ids:
        raise SpecError(f"prompt file {file} is empty: give one with text")
    wanted = max_tokens if max_tokens or file else DEFAULT_TOKENS
    if wanted and wanted > len(ids):
        raise SpecError(f"--prompt-tokens {wanted}: {name} has {len(ids)} tokens: ask for fewer, or give a longer file")
    ids = ids[:wanted]
    room = model.max_positions - num_tokens
    if len(ids) > room:
        remedy = f"--prompt-tokens {room} shortens the prompt" if room > 0 else "ask for fewer --tokens"
        raise SpecError(
            f"the prompt has {len(ids)} tokens and {num_tokens} are to follow, but {model.name} has "
            f"{model.max_positions} positions: {remedy}"
        )
    return name, ids


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise SpecError(f"no such prompt file: {file}") from None
    except UnicodeDecodeError as error:
        raise SpecError(f"prompt file {file} is no UTF-8 text ({error.reason}): give a text file") from None


def _built_in_source() -> str:
    try:
        return inspect.getsource(BUILT_IN)
    except OSError:
        raise SpecError(f"this Python ships no source of {BUILT_IN.__name__}: give --prompt-file") from None
