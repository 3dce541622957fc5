"""One server's soak: its requests, its memory on the way, what it holds afterwards, and how it ends."""

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vtoken.errors import SpecError
from vtoken_bench.soak.asks import Ask, make_asks
from vtoken_bench.soak.drive import Tally, send_all
from vtoken_bench.soak.server import End, Server, running_server

__all__ = ["Result", "Sample", "Soak", "run_soak"]

MODEL = "tiny"
_WARM_SHARE = 0.25  # allocators, caches and threads of vLLM grow at first; growth is counted from here on
_SAMPLE_SECONDS = 1.0
_IDLE_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class Soak:
    """What is sent, and to what: the same for every server."""

    folder: Path
    num_requests: int
    num_clients: int
    block_size: int
    num_blocks: int
    seed: int = 0
    extra: Sequence[str] = ()

    def arguments(self) -> list[str]:
        """Of ``vllm serve``, from the model on."""
        return [
            *(str(self.folder), "--served-model-name", MODEL, "--dtype", "float32", "--enforce-eager"),
            *("--max-model-len", "512", "--max-num-seqs", "16", "--max-num-batched-tokens", "512"),
            *("--block-size", str(self.block_size), "--num-gpu-blocks-override", str(self.num_blocks)),
            *("--kv-cache-memory-bytes", str(1 << 24), "--disable-uvicorn-access-log", *self.extra),
        ]


@dataclass(frozen=True, slots=True)
class Sample:
    """Memory of each kind of process, by name, when ``num_sent`` requests had come to an end."""

    seconds: float
    num_sent: int
    rss_mb: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Result:
    """What one server did. ``leaked_blocks``: held when no request was left; ``preemptions``: over the whole run."""

    tally: Tally
    seconds: float
    samples: Sequence[Sample]
    leaked_blocks: int
    preemptions: int
    end: End

    @property
    def rss_growth_mb(self) -> dict[str, float]:
        """Of each kind of process, and ``total``: from a quarter of the requests to the end."""
        warm = next(sample for sample in self.samples if sample.num_sent >= _WARM_SHARE * self.samples[-1].num_sent)
        last = self.samples[-1].rss_mb
        growth = {name: size - warm.rss_mb.get(name, 0.0) for name, size in last.items()}
        return {**growth, "total": sum(growth.values())}


def run_soak(soak: Soak, vtoken: Mapping[str, Any] | None, tick: Callable[[], None]) -> Result:
    """Starts a server, sends it everything, lets it come to rest, and ends it.

    Args:
        vtoken: the settings of vToken; None is stock vLLM.
        tick: called after each request.
    """
    from vtoken_torch.vllm_plugin import ENABLE
    from vtoken_torch.vllm_plugin.serve import serve_flags, vllm_serve

    is_on = vtoken is not None
    command = [*vllm_serve(), *soak.arguments(), *(serve_flags(vtoken) if vtoken is not None else ())]
    asks = make_asks(soak.num_requests, soak.seed)
    with running_server(command, {ENABLE: str(int(is_on))}) as server:
        start = time.monotonic()
        tally, samples = asyncio.run(_soaked(server, asks, soak.num_clients, is_on, tick))
        seconds = time.monotonic() - start
        leaked = _leaked_blocks(server, asks[0], is_on)
        preemptions = int(server.metric("vllm:num_preemptions_total"))
        return Result(tally, seconds, samples, leaked, preemptions, server.end())


async def _soaked(
    server: Server, asks: Sequence[Ask], num_clients: int, is_on: bool, tick: Callable[[], None]
) -> tuple[Tally, list[Sample]]:
    progress = _Progress(server, tick)
    watch = asyncio.create_task(progress.watch())
    try:
        tally = await send_all(server.url, asks, num_clients, lambda ask: ask.body(MODEL, is_on), progress.advance)
    finally:
        watch.cancel()
    progress.sample()
    return tally, progress.samples


@dataclass(slots=True)
class _Progress:
    server: Server
    tick: Callable[[], None]
    samples: list[Sample] = field(default_factory=list)
    num_sent: int = 0
    start: float = field(default_factory=time.monotonic)

    def advance(self) -> None:
        self.num_sent += 1
        self.tick()

    def sample(self) -> None:
        self.samples.append(Sample(time.monotonic() - self.start, self.num_sent, self.server.rss_mb()))

    async def watch(self) -> None:
        while True:
            self.sample()
            await asyncio.sleep(_SAMPLE_SECONDS)


def _leaked_blocks(server: Server, ask: Ask, is_on: bool) -> int:
    """Blocks that are held once every request is gone.

    vLLM's gauge tells what the last step said, so one more request is sent, and the gauge read until it is at rest.
    """
    last = Ask(ask.prompt, ask.max_tokens, "finish", streamed=False, hang_up_after=0)
    end = time.monotonic() + _IDLE_SECONDS
    while server.metric("vllm:num_requests_running") + server.metric("vllm:num_requests_waiting"):
        if time.monotonic() > end:
            raise SpecError(f"requests of clients that are gone still run after {_IDLE_SECONDS:g} s: see the server")
        time.sleep(0.2)
    asyncio.run(send_all(server.url, [last], 1, lambda ask: ask.body(MODEL, is_on), lambda: None))
    num_usable = server.num_blocks() - 1
    held, end = num_usable, time.monotonic() + 5
    while held and time.monotonic() < end:
        held = round(server.metric("vllm:kv_cache_usage_perc") * num_usable)
        time.sleep(0.1)
    return held
