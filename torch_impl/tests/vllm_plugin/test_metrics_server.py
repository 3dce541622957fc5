"""``/metrics`` of real servers, with one API server and with two, and what is left of them when they end."""

import json
import shutil
import signal
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from vllm_server import Server, add_tokenizer

from vtoken.cli import main
from vtoken_torch.vllm_plugin.stats import Engine, parse

NUM_BLOCKS, BUDGET = 64, 60
PLACES = (Path("/dev/shm"), Path("/run/shm"))


@pytest.fixture(scope="module")
def model(tiny_llama: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("metrics") / "tiny"
    shutil.copytree(tiny_llama, folder)
    add_tokenizer(folder)
    return str(folder)


@pytest.fixture
def temporary(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """For the server alone. Its name is short, since vLLM's sockets lie there."""
    with tempfile.TemporaryDirectory() as folder:
        monkeypatch.setenv("TMPDIR", folder)
        yield Path(folder)


def serve(model: str, folder: Path, *more: str) -> Server:
    settings = (
        *("--policy", "random", "--kv-budget", str(BUDGET), "--interval", "8", "--when", "always"),
        *("--served-model-name", "tiny", "--max-model-len", "512", "--max-num-seqs", "8", "--dtype", "float32"),
        *("--block-size", "32", "--kv-cache-memory-bytes", str(1 << 22)),
        *("--num-gpu-blocks-override", str(NUM_BLOCKS + 1), "--enforce-eager"),
    )
    return Server(folder / "log", model, *settings, *more)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_servers", "number"),
    [pytest.param(1, signal.SIGKILL, id="one, killed"), pytest.param(2, signal.SIGTERM, id="two, asked to end")],
)
def test_metrics_of_a_server_and_what_it_leaves(model, tmp_path, temporary, capsys, num_servers, number):
    server = serve(model, tmp_path, "--api-server-count", str(num_servers))
    family = [psutil.Process(server._process.pid), *psutil.Process(server._process.pid).children(recursive=True)]
    try:
        check_metrics(server)
        assert main(["stats", server.url]) == 0
        assert "evicted tokens" in capsys.readouterr().out
        if number == signal.SIGTERM:
            assert server.stop() == (0, [])
    finally:
        for process in filter(psutil.Process.is_running, family):
            process.kill()
        psutil.wait_procs(family, timeout=20)
        server._process.wait()
    assert files_of_ours(temporary) == []


def check_metrics(server: Server) -> None:
    """The numbers before, during and after a request, and after one whose client hangs up."""
    assert {name: engine(server).values[name] for name in ("pool_blocks", "free_blocks", "held_blocks")} == {
        "pool_blocks": NUM_BLOCKS,
        "free_blocks": NUM_BLOCKS,
        "held_blocks": 0,
    }
    seen = threading.Event()

    def keep_busy() -> None:
        while not seen.is_set():
            complete(server)

    thread = threading.Thread(target=keep_busy, daemon=True)
    thread.start()
    during = until(server, lambda values: values["live_tokens"] > BUDGET / 2 and values["evicted_tokens"] > 100)
    seen.set()
    thread.join()
    after = until(server, lambda values: values["held_blocks"] == 0)
    assert 0 < during["held_blocks"] <= 4
    assert during["held_blocks"] + during["free_blocks"] == NUM_BLOCKS
    assert 0 <= during["fragmentation"] < 1
    assert after["free_blocks"] == NUM_BLOCKS
    assert after["evicted_tokens"] >= 100 + 380 - BUDGET - 8 - 1
    assert after["moved_bytes"] == after["moved_tokens"] * 2 * 2 * 2 * 32 * 4 > 0
    for name in ("recycled_slots", "freed_blocks", "plans", "policy_seconds", "planner_seconds"):
        assert after[name] > 0, name
    complete(server, hang_up=True)
    until(server, lambda values: values["held_blocks"] == 0 and values["evicted_tokens"] > after["evicted_tokens"])
    assert server.metric("vllm:num_requests_running") == 0, "vLLM's own metrics are still there"


def engine(server: Server) -> Engine:
    with urllib.request.urlopen(f"{server.url}/metrics", timeout=100) as answer:
        (only,) = parse(answer.read().decode())
    assert (only.model_name, only.engine) == ("tiny", "0")
    return only


def until(server: Server, is_so: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    """The first numbers of which that is so."""
    end = time.monotonic() + 200
    while not is_so(values := engine(server).values):
        assert time.monotonic() < end, values
        time.sleep(0.05)
    return values


def complete(server: Server, hang_up: bool = False) -> None:
    """One streamed completion; ``hang_up``: of which only the first pieces are read."""
    body = {
        "model": "tiny",
        "prompt": [9] * 100,
        "max_tokens": 380,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
    }
    request = urllib.request.Request(
        f"{server.url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=300) as answer:
        if hang_up:
            answer.read(2000)
        else:
            assert answer.read().rstrip().endswith(b"[DONE]")


def files_of_ours(temporary: Path) -> list[Path]:
    """Files that a server could have left and that carry our name, without or within."""
    files = [path for path in temporary.rglob("*") if path.is_file()]
    files += [path for place in PLACES if place.is_dir() for path in place.iterdir() if path.is_file()]
    return [path for path in files if "vtoken" in path.name or b"vtoken:" in content(path)]


def content(path: Path) -> bytes:
    """What is in the file; nothing if its owner, any other process of this machine, has removed it meanwhile."""
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return b""
