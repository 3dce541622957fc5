"""Compiles one C++ file where it runs, once, and loads it; without a compiler the caller has another way.

What is compiled is kept under a name that every byte which went into it has a part in, so that nothing stale is loaded.
"""

import contextlib
import ctypes
import functools
import hashlib
import logging
import os
import platform
import shlex
import shutil
import subprocess
import sysconfig
import tempfile
from pathlib import Path

from vtoken.cache_folder import cache_folder
from vtoken.plugins import first_line

__all__ = ["HEADERS", "compiler", "load"]

HEADERS = Path(__file__).parent
"""Of ``copy_rows.h``."""

_COMPILERS = ("c++", "g++", "clang++")
_FLAGS = ("-std=c++17", "-O2", "-fPIC", "-shared")
_REMEDY = "install one (Debian, Ubuntu: apt-get install g++) or name it: CXX=/path/to/g++"

_log = logging.getLogger("vtoken")


def compiler() -> list[str] | None:
    """The command of a C++ compiler: ``$CXX``, or the first of c++, g++ and clang++ that is there; None if none is."""
    named = shlex.split(os.environ.get("CXX", ""))
    if named:
        return named if shutil.which(named[0]) else None
    found = next(filter(None, map(shutil.which, _COMPILERS)), None)
    return [found] if found else None


@functools.cache
def load(source: Path, *include: Path) -> ctypes.CDLL | None:
    """The library of one C++ file, compiled on the first use on this machine (a second or two) and kept.

    None where it cannot be: no compiler, or one that fails. A warning says so once, with the reason and the remedy.

    Args:
        source: the file; it may include what lies in ``HEADERS``.
        include: folders of other headers.
    """
    folders = (HEADERS, *include)
    kept = cache_folder() / "native" / f"{source.stem}-{_digest(source, folders)}.so"
    if kept.is_file():
        with contextlib.suppress(OSError):  # damaged: it is made anew
            return ctypes.CDLL(str(kept))
    try:
        return _compile(source, folders, kept)
    except (OSError, subprocess.CalledProcessError) as error:
        _log.warning("%s is not compiled, slower code does its work: %s", source.name, _reason(error))
        return None


def _digest(source: Path, folders: tuple[Path, ...]) -> str:
    told = hashlib.sha256(" ".join((*_FLAGS, platform.machine(), sysconfig.get_platform())).encode())
    for path in (source, *(header for folder in folders for header in sorted(folder.rglob("*.h")))):
        told.update(path.read_bytes())
    return told.hexdigest()[:16]


def _compile(source: Path, folders: tuple[Path, ...], kept: Path) -> ctypes.CDLL:
    command = compiler()
    if command is None:
        raise FileNotFoundError(f"no C++ compiler ($CXX, {', '.join(_COMPILERS)}): {_REMEDY}")
    home = _home(kept.parent)
    with tempfile.TemporaryDirectory(prefix=".compiling-", dir=home) as staging:
        made = Path(staging) / kept.name
        includes = [word for folder in folders for word in ("-isystem", str(folder))]
        subprocess.run([*command, *_FLAGS, *includes, "-o", made, source], check=True, capture_output=True, text=True)
        library = ctypes.CDLL(str(made))  # before it is kept: what does not load is not worth keeping
        if home:
            made.replace(kept)  # another process sees the whole file or none
    return library


def _home(folder: Path) -> Path | None:
    """``folder``, made, or None where nothing can be kept: each process then compiles for itself."""
    with contextlib.suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
    return folder if os.access(folder, os.W_OK) else None


def _reason(error: OSError | subprocess.CalledProcessError) -> str:
    if not isinstance(error, subprocess.CalledProcessError):
        return first_line(error)
    lines = error.stderr.splitlines()
    told = [line for line in lines if "error" in line] or lines[-1:] or [f"exit {error.returncode}"]
    return f"{error.cmd[0]} failed: {told[0]}: {_REMEDY}"
