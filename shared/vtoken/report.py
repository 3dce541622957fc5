"""What every written record shares: the environment it was made in, and files that appear whole or not at all."""

import json
import os
import platform
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

from vtoken.errors import SpecError

__all__ = ["check_output", "environment", "write_bytes", "write_json"]

_PACKAGES = ("vtoken", "numpy", "torch", "jax", "transformers", "vllm")


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
    """Refuses outputs that cannot be written before long work is done for them; makes missing folders.

    Raises:
        SpecError: the path is a folder, or lies beneath a file.
    """
    for path in filter(None, paths):
        if path.is_dir():
            raise SpecError(f"{path} is a folder: name a file")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except (FileExistsError, NotADirectoryError):
            raise SpecError(f"{path} lies beneath a file: name another folder") from None


def write_json(path: Path, record: object) -> None:
    """Writes a record as indented JSON, whole or not at all. NaN and infinity are refused: they are no JSON."""
    write_bytes(path, (json.dumps(record, indent=2, allow_nan=False) + "\n").encode())


def write_bytes(path: Path, data: bytes) -> None:
    """Writes a file through a neighbour that takes its name at the end, so that no reader sees half of it."""
    neighbour = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        neighbour.write_bytes(data)
        neighbour.replace(path)
    finally:
        neighbour.unlink(missing_ok=True)


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
