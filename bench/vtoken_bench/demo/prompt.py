"""The prompt: the source of a module that ships with Python, or a text file."""

import heapq
import inspect
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

from vtoken.errors import SpecError
from vtoken_bench.models import LoadedModel

__all__ = ["BUILT_IN", "DEFAULT_TOKENS", "encode_prompt", "read_prompt"]

BUILT_IN: ModuleType = heapq
"""Prose and code of some 6,500 tokens; the same on every machine with the same Python."""

DEFAULT_TOKENS = 2000
"""Of the built-in prompt; a file is taken whole."""


def read_prompt(file: Path | None) -> tuple[str, str]:
    """The prompt's name and text: a file's, or the built-in module's source. SpecError: not to be read, or no text."""
    if file is None:
        return f"{BUILT_IN.__name__}.py", _built_in_source()
    try:
        text = file.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise SpecError(f"no such prompt file: {file}") from None
    except OSError as error:
        raise SpecError(f"prompt file {file} cannot be read ({error.strerror}): give a text file") from None
    except UnicodeDecodeError as error:
        raise SpecError(f"prompt file {file} is no UTF-8 text ({error.reason}): give a text file") from None
    if not text.strip():
        raise SpecError(f"prompt file {file} is empty: give one with text")
    return file.name, text


def encode_prompt(model: LoadedModel, name: str, text: str, max_tokens: int | None, num_tokens: int) -> Sequence[int]:
    """The prompt's first ``max_tokens`` tokens, or all of them if None.

    Raises:
        SpecError: the prompt has fewer tokens than that, or too many for the model's positions together with the
            ``num_tokens`` that follow.
    """
    ids: Sequence[int] = model.tokenizer(text, verbose=False)["input_ids"]
    if max_tokens and max_tokens > len(ids):
        raise SpecError(f"{name} has {len(ids)} tokens, not {max_tokens}: ask for fewer --prompt-tokens")
    ids = ids[:max_tokens]
    room = model.max_positions - num_tokens
    if len(ids) > room:
        remedy = f"--prompt-tokens {room} shortens the prompt" if room > 0 else "ask for fewer --tokens"
        raise SpecError(
            f"the prompt has {len(ids)} tokens and {num_tokens} are to follow, but {model.name} has "
            f"{model.max_positions} positions: {remedy}"
        )
    return ids


def _built_in_source() -> str:
    try:
        return inspect.getsource(BUILT_IN)
    except OSError:
        raise SpecError(f"this Python ships no source of {BUILT_IN.__name__}: give --prompt-file") from None
