"""More requests than a pool of KV blocks holds: plain vLLM, naive eviction and vToken on the same requests."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, quantiles
from time import perf_counter, process_time
from typing import Any

from vtoken_bench.vllm_engine import VllmEngine

__all__ = ["NATIVE", "Load", "Outcome", "Setup", "run_load", "setups"]

NATIVE = "native"
VARIANTS = ("naive", "vtoken")


@dataclass(frozen=True, slots=True)
class Load:
    """What every variant serves: the same requests, all there from the start, in the same pool.

    Attributes:
        prompts: token ids of each request.
        max_tokens: tokens that each generates.
        block_size, num_blocks: of the pool; one block is vLLM's null block.
        chunk: most tokens of a step (chunked prefill).
        kv_budget, interval: of the evicting variants.
    """

    prompts: Sequence[Sequence[int]]
    max_tokens: int
    block_size: int
    num_blocks: int
    chunk: int
    kv_budget: int
    interval: int


@dataclass(frozen=True, slots=True)
class Setup:
    """One row: stock vLLM (``native``, no policy), or a policy under a variant."""

    variant: str
    policy: str = ""

    @property
    def label(self) -> str:
        """For progress bars and keys."""
        return f"{self.policy}, {self.variant}" if self.policy else self.variant

    def options(self, load: Load) -> dict[str, Any] | None:
        """``additional_config["vtoken"]``; None leaves vLLM as it is."""
        if not self.policy:
            return None
        return {
            "policy": self.policy,
            "kv_budget": load.kv_budget,
            "interval": load.interval,
            "variant": self.variant,
            "when": "always",
        }


@dataclass(frozen=True, slots=True)
class Outcome:
    """One run of one setup.

    Attributes:
        num_steps, mean_running, peak_running, num_preemptions: what the scheduler did; the same in every repeat.
        tokens_per_s, tokens_per_cpu_s: generated tokens by wall time, and by processor time of the whole process.
        latency_s: p50, p95, p99 of the seconds from a request's submission to its last token.
        num_moved_tokens, num_recycled_tokens, num_freed_blocks: the plugin's counters; 0 for native.
        leaked_blocks: blocks that are not back in the pool at the end.
        outputs: token ids of each request.
    """

    num_steps: int
    mean_running: float
    peak_running: int
    num_preemptions: int
    tokens_per_s: float
    tokens_per_cpu_s: float
    latency_s: Mapping[str, float]
    num_moved_tokens: int
    num_recycled_tokens: int
    num_freed_blocks: int
    leaked_blocks: int
    outputs: tuple[tuple[int, ...], ...]

    @property
    def scheduling(self) -> tuple[float, ...]:
        """The figures that do not depend on the clock."""
        return (self.num_steps, self.mean_running, self.peak_running, self.num_preemptions)


def setups(policies: Sequence[str]) -> list[Setup]:
    """Native, then each policy under each variant."""
    return [Setup(NATIVE), *(Setup(variant, policy) for policy in policies for variant in VARIANTS)]


def run_load(folder: Path, setup: Setup, load: Load, on_token: Callable[[int], object] = lambda _: None) -> Outcome:
    """Serves the load on an engine of its own. ``on_token``: told how many tokens a step gave."""
    longest = max(map(len, load.prompts)) + load.max_tokens
    with VllmEngine(
        folder,
        setup.options(load),
        block_size=load.block_size,
        num_blocks=load.num_blocks,
        max_model_len=longest,
        max_num_seqs=len(load.prompts),
        max_num_batched_tokens=load.chunk,
    ) as engine:
        _warm_up(engine, load)
        return _measured(engine, load, on_token)


def _warm_up(engine: VllmEngine, load: Load) -> None:
    engine.submit(load.prompts[0][:8], 2)
    while engine.engine.has_unfinished_requests():
        engine.engine.step()


def _measured(engine: VllmEngine, load: Load, on_token: Callable[[int], object]) -> Outcome:
    free_before, counters = engine.pool.get_num_free_blocks(), _counters(engine)
    names = [engine.submit(prompt, load.max_tokens) for prompt in load.prompts]
    outputs: dict[str, tuple[int, ...]] = dict.fromkeys(names, ())
    ended: dict[str, float] = {}
    with _watched(engine) as (running, preempted):
        start, cpu_start = perf_counter(), process_time()
        while engine.engine.has_unfinished_requests():
            for output in engine.engine.step():
                tokens = tuple(output.outputs[0].token_ids)
                on_token(len(tokens) - len(outputs[output.request_id]))
                outputs[output.request_id] = tokens
                if output.finished:
                    ended[output.request_id] = perf_counter() - start
        seconds, cpu_seconds = perf_counter() - start, process_time() - cpu_start
    num_tokens = sum(map(len, outputs.values()))
    return Outcome(
        num_steps=len(running),
        mean_running=mean(running),
        peak_running=max(running),
        num_preemptions=sum(preempted),
        tokens_per_s=num_tokens / seconds,
        tokens_per_cpu_s=num_tokens / cpu_seconds,
        latency_s=_percentiles(list(ended.values())),
        leaked_blocks=free_before - engine.pool.get_num_free_blocks(),
        outputs=tuple(outputs[name] for name in names),
        **{key: count - counters[key] for key, count in _counters(engine).items()},
    )


@contextmanager
def _watched(engine: VllmEngine) -> Iterator[tuple[list[int], list[int]]]:
    """Requests scheduled, and requests preempted, in each step that ran."""
    running: list[int] = []
    preempted: list[int] = []
    schedule = engine.scheduler.schedule

    def watched(*args: Any, **kwargs: Any) -> Any:
        output = schedule(*args, **kwargs)
        running.append(len(output.num_scheduled_tokens))
        preempted.append(len(output.preempted_req_ids or ()))
        return output

    engine.scheduler.schedule = watched
    try:
        yield running, preempted
    finally:
        del engine.scheduler.schedule


def _counters(engine: VllmEngine) -> dict[str, int]:
    side = getattr(engine.scheduler, "vtoken", None)
    names = ("num_moved_tokens", "num_recycled_tokens", "num_freed_blocks")
    return {name: getattr(side.counters, name) if side else 0 for name in names}


def _percentiles(seconds: Sequence[float]) -> dict[str, float]:
    if len(seconds) == 1:
        return dict.fromkeys(("p50", "p95", "p99"), seconds[0])
    cuts = quantiles(seconds, n=100, method="inclusive")
    return {"p50": cuts[49], "p95": cuts[94], "p99": cuts[98]}
