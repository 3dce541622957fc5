"""Compiles one C++ file where it runs, once, and loads it; without a compiler the caller has another way.

What is compiled is kept under a name that every byte which went into it has a part in, so that nothing stale is loaded,
and every byte that came of it, so that nothing damaged is.
"""

import contextlib
import ctypes
import functools
import hashlib
import logging
import os
import platform
import re
import shlex
import shutil
import subprocess
import sysconfig
import tempfile
import threading
from pathlib import Path

from vtoken.cache_folder import cache_folder
from vtoken.errors import SpecError
from vtoken.plugins import first_line

__all__ = ["HEADERS", "REMEDY", "compiler", "load", "missing_compiler"]

HEADERS = Path(__file__).parent
"""Of ``copy_rows.h``."""

REMEDY = "install one (Debian, Ubuntu: apt-get install g++) or name it: CXX=/path/to/g++"
"""Of a machine without a C++ compiler."""

_COMPILERS = ("c++", "g++", "clang++")
_FLAGS = ("-std=c++17", "-O2", "-fPIC", "-shared")
_TIMEOUT_S = 120
_ANOTHER = "mend that, or name another compiler: CXX=/path/to/g++"

_log = logging.getLogger("vtoken")
_one_at_a_time = threading.Lock()


def compiler() -> list[str] | None:
    """The command of a C++ compiler: ``$CXX``, or the first of c++, g++ and clang++ that is there; None if none is.

    ``$CXX`` is a path, spaces and all, or words as a shell reads them.
    """
    named = _named()
    if not named:
        found = next(filter(None, map(shutil.which, _COMPILERS)), None)
        return [found] if found else None
    if shutil.which(named):
        return [named]
    with contextlib.suppress(ValueError):  # a quote that nothing closes
        words = shlex.split(named)
        return words if shutil.which(words[0]) else None
    return None


def missing_compiler() -> str:
    """Why ``compiler`` finds none: ``$CXX`` is no command, or none is installed."""
    return f"CXX={_named()} is no command" if _named() else f"no C++ compiler ({', '.join(_COMPILERS)})"


def load(source: Path, *include: Path) -> ctypes.CDLL | None:
    """The library of one C++ file, compiled on the first use on this machine (a second or two) and kept.

    A process has one library of a file, also where several threads ask for it at once. None where it cannot be: no
    compiler, or one that fails. A warning says so once, with the reason and the remedy.

    Args:
        source: the file; it may include what lies in ``HEADERS``.
        include: folders of other headers.
    """
    with _one_at_a_time:
        return _load(source, (HEADERS, *include))


@functools.cache
def _load(source: Path, folders: tuple[Path, ...]) -> ctypes.CDLL | None:
    try:
        name, home = f"{source.stem}-{_digest(source, folders)}", _home()
        kept = _load_kept(home, name) if home else None
        return kept or _compile(source, folders, home, name)
    except OSError as error:
        _log.warning("%s is not compiled, slower code does its work: %s", source.name, first_line(error))
        return None


def _named() -> str:
    return os.environ.get("CXX", "").strip()


def _digest(source: Path, folders: tuple[Path, ...]) -> str:
    told = hashlib.sha256(os.fsencode(" ".join((*_FLAGS, _named(), platform.machine(), sysconfig.get_platform()))))
    for path in (source, *(header for folder in folders for header in sorted(folder.rglob("*.h")))):
        told.update(path.read_bytes())
    return told.hexdigest()[:16]


def _home() -> Path | None:
    """The folder of what is kept, made if need be, or None where none can be: each process then compiles for itself."""
    try:
        folder = cache_folder() / "native"
        folder.mkdir(parents=True, exist_ok=True)
    except (OSError, SpecError):
        return None
    return folder


def _load_kept(home: Path, name: str) -> ctypes.CDLL | None:
    """None also if it is damaged: to load a file that was cut short may end the process by a signal."""
    for path in home.glob(f"{name}-*.so"):
        with contextlib.suppress(OSError):  # another machine's, or not for this user
            if path.name == _kept_name(name, path):
                return ctypes.CDLL(str(path))
    return None


def _kept_name(name: str, made: Path) -> str:
    return f"{name}-{hashlib.sha256(made.read_bytes()).hexdigest()[:16]}.so"


def _compile(source: Path, folders: tuple[Path, ...], home: Path | None, name: str) -> ctypes.CDLL:
    command = compiler()
    if command is None:
        raise FileNotFoundError(f"{missing_compiler()}: {REMEDY}")
    place = home if home and os.access(home, os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix=".compiling-", dir=place, ignore_cleanup_errors=True) as staging:
        made = Path(staging) / f"{name}.so"
        includes = [word for folder in folders for word in ("-isystem", str(folder))]
        _run([*command, *_FLAGS, *includes, "-o", str(made), str(source)])
        try:
            library = ctypes.CDLL(str(made))  # before it is kept: what does not load is not worth keeping
        except OSError as error:
            raise OSError(f"what {command[0]} made does not load: {first_line(error)}: {_ANOTHER}") from error
        if place:
            with contextlib.suppress(OSError):  # it is loaded, kept or not
                made.replace(place / _kept_name(name, made))  # another process sees the whole file or none
    return library


def _run(command: list[str]) -> None:
    """Raises OSError, which quotes the compiler, unless it is done in time and content.

    It speaks to a file: a pipe would be waited for until the last of its children, which a hang outlives, closes it.
    """
    with tempfile.TemporaryFile() as said:
        try:
            done = subprocess.run(
                command, stdin=subprocess.DEVNULL, stdout=said, stderr=said, timeout=_TIMEOUT_S, check=False
            )
        except subprocess.TimeoutExpired:
            raise OSError(f"{command[0]} did not end within {_TIMEOUT_S} s: {_ANOTHER}") from None
        said.seek(0)
        lines = said.read().decode(errors="replace").splitlines()
    if done.returncode:
        told = [line for line in lines if re.search("error|failed", line)] or lines[-1:] or [f"exit {done.returncode}"]
        raise OSError(f"{command[0]} failed: {told[0]}: {_ANOTHER}")
