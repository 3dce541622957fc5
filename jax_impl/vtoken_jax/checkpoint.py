"""Folders of arrays and one JSON value by orbax, with a list of files that shows whether all of them are whole."""

import json
import zlib
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp

from vtoken.errors import SpecError
from vtoken.plugins import first_line

__all__ = ["load_arrays", "load_meta", "save"]

_FILES = "files.json"
"""Written last: path to size and CRC-32 of every other file."""


def save(folder: Path, meta: Any, arrays: Any) -> None:
    """Writes a new folder. ``arrays`` is a pytree that orbax's standard handler takes.

    Raises SpecError if the folder exists, or cannot be written.
    """
    folder = folder.absolute()
    if folder.exists():
        raise SpecError(f"{folder} exists: give a new folder")
    args = ocp.args.Composite(meta=ocp.args.JsonSave(meta), arrays=ocp.args.StandardSave(arrays))
    try:
        with _checkpointer() as checkpointer:
            checkpointer.save(folder, args)
        (folder / _FILES).write_text(json.dumps(_facts_of_files(folder)), encoding="utf-8")
    except OSError as error:
        raise SpecError(f"{folder} cannot be written: {first_line(error)}: choose another place") from error


def load_meta(folder: Path, format_name: str) -> dict[str, Any]:
    """The JSON value, once all files are known to be whole.

    Raises SpecError: there is nothing, it is torn, or its ``format`` is not ``format_name``.
    """
    folder = folder.absolute()
    if not any((folder / name).exists() for name in ("meta", "arrays", _FILES)):
        raise SpecError(f"{folder} holds no {format_name.split('/')[1]}: give a folder that was saved")
    try:
        expected = json.loads((folder / _FILES).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        raise SpecError(f"{folder} is torn: its list of files does not read: take an older one") from None
    found = _facts_of_files(folder)
    if broken := sorted(name for name in expected if found.get(name) != expected[name]):
        raise SpecError(f"{folder} is torn: {broken[0]} is missing or was changed: take an older one")
    meta = _restore(folder, "meta", ocp.args.JsonRestore())
    if meta["format"] != format_name:
        raise SpecError(
            f"{folder} has the format {meta['format']!r}, not {format_name!r}: use the version that wrote it"
        )
    return dict(meta)


def load_arrays(folder: Path, like: Any) -> Any:
    """The arrays, on the default device; ``like`` is a pytree of the same structure, shapes and dtypes."""
    targets = jax.tree.map(ocp.utils.to_shape_dtype_struct, like)
    return _restore(folder.absolute(), "arrays", ocp.args.StandardRestore(targets))


def _restore(folder: Path, item: str, args: Any) -> Any:
    try:
        with _checkpointer() as checkpointer:
            return checkpointer.restore(folder, ocp.args.Composite(**{item: args}))[item]
    except Exception as error:  # whatever orbax and tensorstore raise
        raise SpecError(f"{folder} does not read: {item}: {first_line(error)}: take another one") from error


def _facts_of_files(folder: Path) -> dict[str, list[int]]:
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != _FILES)
    return {path.relative_to(folder).as_posix(): [path.stat().st_size, _crc(path)] for path in files}


def _crc(path: Path) -> int:
    total = 0
    with path.open("rb") as file:
        while piece := file.read(1 << 20):
            total = zlib.crc32(piece, total)
    return total


def _checkpointer() -> Any:
    return ocp.Checkpointer(ocp.CompositeCheckpointHandler())
