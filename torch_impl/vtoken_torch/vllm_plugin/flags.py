"""The engine's settings as command-line options, made from the dataclasses that define and describe them.

Values are handed on as they are: the settings' own checks judge them, with the remedy. Imports neither vLLM nor torch.
"""

import argparse
import difflib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, Field, fields
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from vtoken.config import VTokenConfig
from vtoken.errors import SpecError
from vtoken.plugins import POLICIES, plugin_names
from vtoken_torch.vllm_plugin.options import PluginOptions

__all__ = ["add_flags", "check_typos", "flag_of", "given_flags", "options_of"]

_RENAMED = {"seed": "policy-seed"}  # vLLM has a --seed of its own
_UNSERVED = ("regime",)  # it follows from copy_stream: taken, so that the refusal says so, and not listed
_UNGUESSED = (*_UNSERVED, "mode")  # vLLM has a --model
_CLOSE = 0.85  # a misspelt option of ours; no other option of vLLM comes that near


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Adds one option for each setting to ``parser``, in two groups. What is not given stays None."""
    for title, owner in (("what dies, and when", VTokenConfig), ("the engine", PluginOptions)):
        group = parser.add_argument_group(title)
        described = _descriptions(owner)
        for field in _settings(owner):
            text = argparse.SUPPRESS if field.name in _UNSERVED else _help(field, described.get(field.name, ""))
            group.add_argument(flag_of(field.name), dest=field.name, help=text, **_kind(field))


def given_flags(arguments: argparse.Namespace) -> dict[str, Any]:
    """The settings that were given, as ``additional_config["vtoken"]`` takes them; JSON can carry them."""
    return {name: value for name in _names() if (value := getattr(arguments, name)) is not None}


def options_of(settings: Mapping[str, Any]) -> PluginOptions:
    """The settings, checked. Raises SpecError that names the option as it is typed."""
    known = plugin_names(POLICIES)
    if "policy" in settings and settings["policy"] not in known:
        raise SpecError(f"--policy {settings['policy']}: choose one of {', '.join(known)}")
    try:
        return PluginOptions.required({"vtoken": settings})
    except SpecError as error:
        key, equals, rest = str(error).partition("=")
        raise SpecError(f"{flag_of(key)}={rest}" if equals and key in settings else _with_flags(str(error))) from None


def _with_flags(message: str) -> str:
    """A message about settings that were left out, with the options that give them."""
    if message.startswith("policy is missing"):
        return message.replace("policy", f"policy ({flag_of('policy')})", 1)
    budgets = "kv_budget and eviction_ratio"
    shown = f"kv_budget ({flag_of('kv_budget')}) and eviction_ratio ({flag_of('eviction_ratio')})"
    return message.replace(f"exactly one of {budgets}", f"exactly one of {shown}")


def check_typos(words: Sequence[str]) -> None:
    """Refuses a word that is nearly an option of ours: vLLM would refuse it too, but only once it is loaded."""
    known = [flag_of(name) for name in _names() if name not in _UNGUESSED]
    for word in words:
        name = word.partition("=")[0].replace("_", "-")
        close = difflib.get_close_matches(name, known, n=1, cutoff=_CLOSE) if name.startswith("--") else []
        if close:
            raise SpecError(
                f"unknown option {word!r}: did you mean {close[0]}? (what follows a -- goes to vLLM as it is)"
            )


def flag_of(name: str) -> str:
    """The option of the setting ``name``."""
    return "--" + _RENAMED.get(name, name.replace("_", "-"))


def _settings(owner: type) -> Iterator[Field[Any]]:
    return (field for field in fields(owner) if field.type is not VTokenConfig)


def _names() -> list[str]:
    return [field.name for owner in (VTokenConfig, PluginOptions) for field in _settings(owner)]


def _kind(field: Field[Any]) -> dict[str, Any]:
    types = set(get_args(field.type) or (field.type,))
    if bool in types:
        return {"action": argparse.BooleanOptionalAction, "default": None}
    if field.name == "protected":
        return {"type": _ranges, "metavar": "prompt|A:B,..."}
    if types & {int, float}:
        return {"type": _number, "metavar": "N" if int in types else "X"}
    if get_origin(field.type) is Literal:
        return {"metavar": "|".join(get_args(field.type))}
    return {"metavar": "FILE" if Path in types else "NAME"}


def _help(field: Field[Any], text: str) -> str:
    default = {True: "on", False: "off"}[field.default] if isinstance(field.default, bool) else field.default
    shown = "" if default in (MISSING, None, ()) else f" ({default})"
    return text.replace("%", "%%").replace("``", "").rstrip(".") + shown


def _descriptions(owner: type) -> dict[str, str]:
    """Attribute -> its sentence in the docstring; empty where Python runs without docstrings."""
    attributes = (owner.__doc__ or "").partition("Attributes:")[2]
    found = re.findall(r"^ {8}(\w[\w, ]*): (.*(?:\n {9,}.*)*)", attributes, flags=re.MULTILINE)
    return {name: " ".join(text.split()) for names, text in found for name in names.split(", ")}


def _number(text: str) -> int | float | str:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def _ranges(text: str) -> str | list[list[int | float | str]]:
    """``0:64,128:192`` as pairs."""
    return text if ":" not in text else [[_number(end) for end in pair.split(":")] for pair in text.split(",")]
