"""What one side of a comparison takes of the process's memory, as Linux counts it."""

import ctypes
import gc
import re
from collections.abc import Callable
from pathlib import Path

__all__ = ["available_bytes", "growth", "peak_rise", "resident_bytes"]

_STATUS, _RESET = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def resident_bytes() -> int | None:
    """Resident memory, after what is garbage or free has been given back; None where the system does not tell."""
    gc.collect()
    return _trimmed()


def available_bytes() -> int | None:
    """What the machine can still give to processes, after what is free here has been given back; None where it does not
    tell.
    """
    resident_bytes()
    return _read(Path("/proc/meminfo"), "MemAvailable")


def growth(before: int | None) -> int | None:
    """Resident memory since ``before``."""
    now = resident_bytes()
    return None if now is None or before is None else max(0, now - before)


def peak_rise(work: Callable[[], object]) -> int | None:
    """Runs ``work``; how far resident memory rises meanwhile above what it was, at its highest."""
    before = _trimmed()
    try:
        _RESET.write_text("5")  # the highest is from now on
    except OSError:
        before = None
    work()
    highest = _read(_STATUS, "VmHWM")
    return None if highest is None or before is None else max(0, highest - before)


def _trimmed() -> int | None:
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
    return _read(_STATUS, "VmRSS")


def _read(path: Path, key: str) -> int | None:
    try:
        found = re.search(rf"^{key}:\s+(\d+) kB", path.read_text(), re.MULTILINE)
    except OSError:
        return None
    return int(found[1]) * 1024 if found else None
