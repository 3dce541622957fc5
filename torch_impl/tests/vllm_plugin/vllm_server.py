"""A server that ``vtoken serve`` started, as a shell starts what its dry run prints."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest

psutil = pytest.importorskip("psutil")  # vLLM brings it

ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "TORCHDYNAMO_DISABLE": "1",  # vLLM compiles its count of logprob ranks whatever --enforce-eager says
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "INFO",
    "VLLM_NO_USAGE_STATS": "1",
}


def add_tokenizer(folder: Path) -> None:
    """512 tokens: the bytes, three special ones, and pairs of letters that no text is split into."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = "abcdefghijklmnopqrstuvwxyz"
    words = ["<pad>", "<s>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    words += [a + b for a in letters for b in letters][: 512 - len(words)]
    tokenizer = Tokenizer(models.BPE({word: number for number, word in enumerate(words)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    fast.save_pretrained(folder)


class Server:
    """``arguments``: of ``vtoken serve``, from the model on. Raises with the log's end if it does not come up."""

    def __init__(self, log: Path, *arguments: str) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        self._log = log
        vtoken = (sys.executable, "-c", "from vtoken.cli import main; raise SystemExit(main())")
        dry_run = (*vtoken, "serve", *arguments, "--host", "127.0.0.1", "--port", str(port), "--dry-run")
        line = subprocess.run(dry_run, capture_output=True, text=True, check=True).stdout
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                ("sh", "-c", f"exec env {line}"),  # the shell gives way to it, so that stop() signals the server itself
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd=log.parent,
                env={**os.environ, **ENVIRONMENT},
            )
        self._wait()

    def get(self, path: str) -> str:
        with urllib.request.urlopen(self.url + path, timeout=10) as answer:
            return str(answer.read().decode())

    def metric(self, name: str) -> float:
        """The sum of a metric's samples on ``/metrics``."""
        lines = [line for line in self.get("/metrics").splitlines() if line.startswith((f"{name}{{", f"{name} "))]
        assert lines, f"no {name}"
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines)

    def stop(self, number: int = signal.SIGTERM, seconds: float = 60) -> tuple[int, list[Any]]:
        """Sends the signal: the exit code, and those of the server's processes that outlived it."""
        family = [self._root(), *self._root().children(recursive=True)]
        self._process.send_signal(number)
        code = self._process.wait(seconds)
        _, alive = psutil.wait_procs(family, timeout=5)
        return code, alive

    def kill(self) -> None:
        """Ends whatever is left; for a test that fails."""
        with contextlib.suppress(psutil.NoSuchProcess):
            for process in (*self._root().children(recursive=True), self._root()):
                process.kill()
        self._process.wait()

    def log(self) -> str:
        return self._log.read_text(errors="replace")

    def _root(self) -> Any:
        return psutil.Process(self._process.pid)

    def _wait(self, seconds: float = 600) -> None:
        end = time.monotonic() + seconds
        while True:
            try:
                self.get("/health")
                return
            except (urllib.error.URLError, ConnectionError, TimeoutError):
                time.sleep(0.5)
            if self._process.poll() is not None or time.monotonic() > end:
                self.kill()
                raise AssertionError(f"the server did not start:\n{self.log()[-6000:]}")
