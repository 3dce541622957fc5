"""Finds commands, executors and policies by name in the entry points of the installed distributions.

One plugin that fails to import never hides the others: it is reported by name, with the reason and, where a package is
missing, with the extra to install.
"""

import difflib
import importlib.util
import re
from collections.abc import Sequence
from importlib import metadata
from typing import Any

from vtoken.errors import SpecError

__all__ = [
    "COMMANDS",
    "EXECUTORS",
    "POLICIES",
    "first_line",
    "get_plugin",
    "load_plugins",
    "missing_extra",
    "plugin_names",
    "require_extra",
    "unknown_name",
]

COMMANDS = "vtoken.commands"
EXECUTORS = "vtoken.executors"
POLICIES = "vtoken.policies"

_SINGULAR = {COMMANDS: "command", EXECUTORS: "executor", POLICIES: "policy"}
_EXTRA_MARKER = re.compile(r"^(?P<name>[\w.-]+).*;.*\bextra\s*==\s*['\"](?P<extra>[\w.-]+)['\"]")


def plugin_names(group: str) -> list[str]:
    """Names registered in ``group``, sorted; nothing is imported."""
    return sorted({point.name for point in metadata.entry_points(group=group)})


def load_plugins(group: str) -> tuple[dict[str, Any], dict[str, SpecError]]:
    """Imports every plugin of ``group``.

    Returns:
        The loaded objects by name, and the errors of the others by name: one line each, saying why and what to
        install; ``__cause__`` is what the plugin raised.
    """
    loaded: dict[str, Any] = {}
    failed: dict[str, SpecError] = {}
    for name in plugin_names(group):
        try:
            loaded[name] = _load(group, name)
        except SpecError as error:
            failed[name] = error
    return loaded, failed


def get_plugin(group: str, name: str) -> Any:
    """The one plugin ``name`` of ``group``, with no other imported.

    Raises:
        SpecError: the name is unknown (the message names the closest known one), or its import fails.
    """
    kind = _SINGULAR.get(group, "plugin")
    known = plugin_names(group)
    if name not in known:
        raise unknown_name(kind, name, known)
    try:
        return _load(group, name)
    except SpecError as error:
        raise SpecError(f"{kind} {name!r} does not load: {error}") from error


def unknown_name(kind: str, name: str, known: Sequence[str]) -> SpecError:
    """The refusal of a name that is none of ``known``; it has the closest of them, or all."""
    close = difflib.get_close_matches(name, known, n=3)
    hint = f"did you mean {' or '.join(map(repr, close))}?" if close else f"known: {', '.join(known) or 'none'}"
    return SpecError(f"unknown {kind} {name!r}: {hint}")


def missing_extra(error: ModuleNotFoundError) -> str | None:
    """The pip command that brings the missing module by the smallest extra of vtoken, or None if no extra brings it."""
    module = _normal((error.name or "").partition(".")[0])
    extras: dict[str, list[str]] = {}
    for match in filter(None, map(_EXTRA_MARKER.match, _requirements())):
        extras.setdefault(match["extra"], []).append(_normal(match["name"]))
    fit = [extra for extra, brings in extras.items() if module in brings]
    return f"pip install 'vtoken[{min(fit, key=lambda extra: len(extras[extra]))}]'" if fit else None


def require_extra(package: str, extra: str, *modules: str) -> None:
    """Called by a package's ``__init__``: refuses with one line if a module of its extra is not installed.

    Raises:
        ModuleNotFoundError: names the package, the missing module and the extra to install.
    """
    for module in modules:
        if importlib.util.find_spec(module) is None:
            raise ModuleNotFoundError(f"{package} needs {module}: pip install 'vtoken[{extra}]'", name=module)


def first_line(error: BaseException) -> str:
    """The first line of an error's message that says something, without its full stop: a remedy may follow."""
    return next((line for each in str(error).splitlines() if (line := each.strip().rstrip("."))), "no message")


def _load(group: str, name: str) -> Any:
    points = {point.value: point for point in metadata.entry_points(group=group, name=name)}
    if len(points) > 1:
        raise SpecError(f"registered more than once, as {' and '.join(sorted(points))}: uninstall one")
    (point,) = points.values()
    try:
        return point.load()
    except (Exception, SystemExit) as error:  # whatever a plugin raises, the others must go on
        raise SpecError(_reason(error)) from error


def _reason(error: BaseException) -> str:
    text = first_line(error)
    if not isinstance(error, ModuleNotFoundError):
        return f"{type(error).__name__}: {text}"
    remedy = None if "pip install" in text else missing_extra(error)
    return f"{text}: {remedy}" if remedy else text


def _normal(name: str) -> str:
    return name.replace("_", "-").lower()


def _requirements() -> list[str]:
    try:
        return metadata.requires("vtoken") or []
    except metadata.PackageNotFoundError:
        return []  # run from a source tree that is not installed: no extras to name
