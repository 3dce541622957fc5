"""What ``/metrics`` of a real server must show, and what may be left when the server ends or dies."""

import json
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from vllm_server import Server

from vtoken_torch.vllm_plugin.stats import Engine, parse

psutil = pytest.importorskip("psutil")  # vLLM brings it

NUM_BLOCKS, BUDGET = 64, 60
SERVE = (
    *("--policy", "random", "--kv-budget", str(BUDGET), "--interval", "8", "--when", "always"),
    *("--served-model-name", "tiny", "--max-model-len", "512", "--max-num-seqs", "8", "--dtype", "float32"),
    *("--block-size", "32", "--kv-cache-memory-bytes", str(1 << 22)),
    *("--num-gpu-blocks-override", str(NUM_BLOCKS + 1), "--enforce-eager", "--no-enable-prefix-caching"),
)
"""Arguments of ``vtoken serve`` behind the model's."""

PLACES = (Path("/dev/shm"), Path("/run/shm"))


@contextmanager
def temporary_folder() -> Iterator[Path]:
    """For the server alone, and for what it starts. Its name is short, since vLLM's sockets lie there."""
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", folder)
        yield Path(folder)


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
    until(server, lambda _: server.metric("vllm:num_requests_running") == 0)  # vLLM's own, which lag behind a hang-up


def engine(server: Server) -> Engine:
    (only,) = engines(server)
    assert (only.model_name, only.engine) == ("tiny", "0")
    return only


def engines(server: Server) -> list[Engine]:
    with urllib.request.urlopen(f"{server.url}/metrics", timeout=100) as answer:
        return sorted(parse(answer.read().decode()), key=lambda each: each.engine)


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


def kill_the_engine(server: Server) -> None:
    """The engine's process alone: the others notice, and end by themselves."""
    others = family_of(server)[1:]
    (core,) = [process for process in others if process.name().startswith("VLLM::EngineCor")]
    core.kill()
    server._process.wait(120)
    _, alive = psutil.wait_procs(others, timeout=30)
    assert alive == []


def family_of(server: Server) -> list[Any]:
    root = psutil.Process(server._process.pid)
    return [root, *root.children(recursive=True)]


def kill_all(server: Server, family: list[Any]) -> None:
    for process in filter(psutil.Process.is_running, family):
        process.kill()
    server._process.wait()
    psutil.wait_procs(family, timeout=20)


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
