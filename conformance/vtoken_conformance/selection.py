"""Which executors run: found by name or as MODULE:CLASS, made once to see that it works, held against the protocol."""

import importlib
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from vtoken.errors import SpecError
from vtoken.executor import Executor
from vtoken.plugins import EXECUTORS, first_line, get_plugin, load_plugins, plugin_names, unknown_name

__all__ = ["VLLM", "load_executors"]

VLLM = "vllm"
"""A name that the command takes beside those of executors: an engine, which is run by other code."""

_MEMBERS = [name for name in vars(Executor) if not name.startswith("_")]


def load_executors(names: Sequence[str] | None) -> tuple[dict[str, Callable[[], Any]], dict[str, SpecError]]:
    """Executor classes by name, and the reasons against those left out; ``None`` asks for all that are installed.

    Raises:
        SpecError: an executor asked for by name cannot be imported, cannot be made, or lacks parts of the protocol; or
            none of those installed can serve.
    """
    if names is not None:
        return {name: _checked(name, _find(name)) for name in names}, {}
    found, failed = load_plugins(EXECUTORS)
    good = {}
    for name, make in found.items():
        try:
            good[name] = _checked(name, make)
        except SpecError as error:
            failed[name] = error
    if not good:
        reasons = "; ".join(f"{name}: {reason}" for name, reason in failed.items())
        raise SpecError(f"no executor loads ({reasons or 'none is installed'}): name one that does with --executor")
    return good, failed


def _find(name: str) -> Any:
    if ":" in name:
        return _import_class(name)
    known = [*plugin_names(EXECUTORS), VLLM]
    if name not in known:
        raise SpecError(f"{unknown_name('executor', name, known)} (one of your own is named as MODULE:CLASS)")
    return get_plugin(EXECUTORS, name)


def _import_class(path: str) -> type:
    module_name, _, name = path.partition(":")
    if not module_name or not name:
        raise SpecError(f"executor {path!r}: a part is missing: give MODULE:CLASS, for example my_module:MyExecutor")
    if (here := str(Path.cwd())) not in sys.path:
        sys.path.insert(0, here)  # as for `python -m`: an executor being written is a file at hand
    try:
        made = getattr(_import_module(path, module_name), name)
    except AttributeError as error:
        raise SpecError(
            f"executor {path!r}: {first_line(error)}: give MODULE:CLASS as Python would import it"
        ) from error
    if not isinstance(made, type):
        raise SpecError(f"executor {path!r} is no class: give MODULE:CLASS")
    return made


def _import_module(path: str, name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        places = "the module may lie in the current directory, in a folder on PYTHONPATH, or be installed"
        raise SpecError(f"executor {path!r}: {first_line(error)}: give MODULE:CLASS; {places}") from error
    except (Exception, SystemExit) as error:  # whatever the module does when it is imported
        remedy = f"repair the module (`python -c 'import {name}'` shows where)"
        raise SpecError(f"executor {path!r}: its import raises {_described(error)}: {remedy}") from error


def _checked(name: str, make: Callable[[], Any]) -> Callable[[], Any]:
    try:
        executor = make()
        missing = [member for member in _MEMBERS if not hasattr(executor, member)]
    except (Exception, SystemExit) as error:  # whatever the executor does when it is made
        remedy = "it must be made without arguments; `allocate` tells the shape"
        raise SpecError(f"executor {name!r} cannot be made: {_described(error)}: {remedy}") from error
    if missing:
        raise SpecError(
            f"executor {name!r} lacks {', '.join(missing)}: implement the protocol vtoken.executor.Executor"
        )
    return make


def _described(error: BaseException) -> str:
    return f"{type(error).__name__}: {first_line(error)}"
