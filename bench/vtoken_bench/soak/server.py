"""A server of our own: started, watched from outside, ended by SIGTERM."""

import contextlib
import os
import re
import signal
import socket
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vtoken.errors import SpecError
from vtoken_conformance.vllm_engine import ENVIRONMENT

__all__ = ["End", "Server", "running_server"]

_ENVIRONMENT = {**ENVIRONMENT, "VLLM_LOGGING_LEVEL": "WARNING"}  # its log says why it did not start
_START_SECONDS, _END_SECONDS = 600.0, 60.0


@dataclass(frozen=True, slots=True)
class End:
    """How a server ended: its exit code, and how many of its processes outlived it."""

    exit_code: int
    num_left: int


class Server:
    """A running server at ``url``."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], log: Any) -> None:
        import psutil

        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        self._log = log
        self._process = psutil.Popen(
            [*command, "--host", "127.0.0.1", "--port", str(port)],
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**_ENVIRONMENT, **os.environ, **environment},
        )

    def wait_until_it_answers(self) -> None:
        """Raises SpecError with the log's end if the server does not come up."""
        end = time.monotonic() + _START_SECONDS
        while True:
            with contextlib.suppress(urllib.error.URLError, ConnectionError, TimeoutError):
                self._get("/health")
                return
            if self._process.poll() is not None or time.monotonic() > end:
                raise SpecError(f"the server did not start; its log ends:\n{self.log_end()}")
            time.sleep(0.25)

    def metric(self, name: str) -> float:
        """Sum of the samples of a metric on ``/metrics``; 0 if there is none yet."""
        pattern = re.compile(rf"^{re.escape(name)}(?:{{.*}})? (\S+)$", re.MULTILINE)
        return sum(float(value) for value in pattern.findall(self._get("/metrics")))

    def num_blocks(self) -> int:
        """Blocks of the pool, vLLM's null block included."""
        found = re.search(r'^vllm:cache_config_info{.*\bnum_gpu_blocks="(\d+)"', self._get("/metrics"), re.MULTILINE)
        if found is None:
            raise SpecError("the server's /metrics has no vllm:cache_config_info: start it with metrics")
        return int(found[1])

    def rss_mb(self) -> dict[str, float]:
        """Resident memory of each process, by what it is called."""
        import psutil

        sizes: dict[str, float] = {}
        for process in self._family():
            with contextlib.suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
                title = (process.cmdline() or [process.name()])[0]
                role = title if title.startswith("VLLM::") else "VLLM::APIServer" if process == self._process else None
                if role:
                    sizes[role] = sizes.get(role, 0.0) + process.memory_info().rss / 2**20
        return sizes

    def end(self) -> End:
        """SIGTERM, and what came of it. A process that does not end is killed."""
        import psutil

        family = self._family()
        self._process.send_signal(signal.SIGTERM)
        try:
            code = int(self._process.wait(_END_SECONDS))
        except psutil.TimeoutExpired:
            code = -signal.SIGKILL
        _, left = psutil.wait_procs(family[1:], timeout=5)
        self.kill(family)
        return End(code, len(left))

    def kill(self, family: Sequence[Any] | None = None) -> None:
        """Ends whatever of it still runs."""
        import psutil

        for process in family or self._family():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()

    def log_end(self) -> str:
        """The last lines of its output."""
        self._log.seek(0)
        return "\n".join(self._log.read().decode(errors="replace").splitlines()[-30:])

    def _family(self) -> list[Any]:
        import psutil

        with contextlib.suppress(psutil.NoSuchProcess):
            return [self._process, *self._process.children(recursive=True)]
        return []

    def _get(self, path: str) -> str:
        with urllib.request.urlopen(self.url + path, timeout=30) as answer:
            return str(answer.read().decode())


@contextlib.contextmanager
def running_server(command: Sequence[str], environment: Mapping[str, str]) -> Iterator[Server]:
    """The server of ``command``, once it answers; whatever is left of it at the end is killed."""
    with tempfile.TemporaryFile() as log:
        server = Server(command, environment, log)
        try:
            server.wait_until_it_answers()
            yield server
        finally:
            server.kill()
