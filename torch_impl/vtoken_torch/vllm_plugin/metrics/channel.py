"""Anonymous shared memory between the engine's process and the API server's: no file, so none can be left behind.

The API server's process makes a ``memfd`` before it starts the engine and names it in the environment. The engine
opens it through ``/proc``, which only the same user may do, and overwrites its own page at each publication. Nobody
waits for anybody, no thread serves it, and the kernel drops the memory with the last process, whatever ended it.
"""

import json
import logging
import os
import struct
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Self

from vtoken_torch.vllm_plugin.metrics.names import Values

__all__ = ["CHANNEL", "ChannelReader", "ChannelWriter"]

CHANNEL = "VTOKEN_METRICS_CHANNEL"
"""Environment variable ``PID:FD`` by which an engine finds the memory of the server that started it."""

logger = logging.getLogger("vllm.vtoken")

_NAME = "vtoken-metrics"
_PAGE = 1 << 16  # bytes for each engine; untouched ones take no memory
_HEADER = struct.Struct("<II")  # length and CRC-32 of the message that follows
_TRIES = 100


class ChannelReader:
    """The server's end. It owns the memory, and holds it as long as it lives."""

    def __init__(self) -> None:
        self._fd = os.memfd_create(_NAME)
        os.environ[CHANNEL] = f"{os.getpid()}:{self._fd}"

    def read(self) -> list[tuple[tuple[str, ...], Values]]:
        """Labels and numbers that each engine sent last, in the engines' order."""
        pages = range(0, os.fstat(self._fd).st_size, _PAGE)
        return [sent for offset in pages if (sent := self._read_page(offset)) is not None]

    def _read_page(self, offset: int) -> tuple[tuple[str, ...], Values] | None:
        for _ in range(_TRIES):  # a writer may be at it
            page = os.pread(self._fd, _PAGE, offset)
            length, crc = _HEADER.unpack_from(page)
            text = page[_HEADER.size : _HEADER.size + length]
            if length and zlib.crc32(text) == crc:
                labels, values = json.loads(text)
                return tuple(labels), values
        return None


class ChannelWriter:
    """An engine's end."""

    def __init__(self, fd: int, engine_index: int, labels: Sequence[str]) -> None:
        self._fd = fd
        self._offset = engine_index * _PAGE
        self._labels = labels

    @classmethod
    def open(cls, engine_index: int, labels: Sequence[str]) -> Self | None:
        """The memory that the environment names; None if it names none, or none that is there (the log says so)."""
        name = os.environ.get(CHANNEL)
        if name is None:
            return None
        pid, _, fd = name.partition(":")
        path = Path(f"/proc/{pid}/fd/{fd}")
        try:
            if not str(path.readlink()).startswith(f"/memfd:{_NAME}"):
                raise FileNotFoundError(f"{path} is not a server's memory")
            return cls(os.open(path, os.O_RDWR | os.O_CLOEXEC), engine_index, labels)
        except OSError as error:
            logger.warning("vToken: no metrics, since %s=%s leads nowhere (%s): unset it", CHANNEL, name, error)
            return None

    def write(self, values: Values) -> None:
        """Replaces the engine's message. A reader sees the old one or the new one, by the checksum."""
        text = json.dumps([self._labels, values]).encode()
        os.pwrite(self._fd, _HEADER.pack(len(text), zlib.crc32(text)) + text, self._offset)

    def close(self) -> None:
        """Leaves the memory to the server, with the last message in it."""
        os.close(self._fd)
