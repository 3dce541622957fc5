"""What the plugin adds to a step of vLLM: clocks inside its hooks, and engines with and without it side by side.

All requests of an engine decode, one token each a step. Their prompts differ in length, so that a policy's intervals
end evenly spread over the steps. The pool has room to spare.

What is added is *net*: the time in the hooks (*gross*) less the work that they replace. Where a hook answers a call by
itself, vLLM's own method does not run; what such a call takes is measured in plain vLLM, in the same state and the same
run, and taken off. Nothing is taken off for a call that goes on to vLLM's method, nor for one whose time is not known.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass, field
from pathlib import Path
from random import Random
from time import perf_counter, process_time
from typing import Any

from vtoken.errors import InvariantError
from vtoken.types import cdiv
from vtoken_bench.hook_clock import EngineClock, HookClock
from vtoken_bench.timing import Spread
from vtoken_bench.vllm_engine import VllmEngine

__all__ = ["STOCK", "Case", "Clocked", "Decoding", "Load", "cases", "clocked_rounds", "cpu_ratios", "own_ns"]

_BLOCK_SIZE = 32
_PLUGIN = "vtoken_torch"


@dataclass(frozen=True, slots=True)
class Load:
    """The requests of every engine, and how long it is watched.

    Attributes:
        num_requests: requests that decode at once.
        prompt_len: tokens of the shortest prompt; the others are up to an interval longer.
        kv_budget, interval: of the policies.
        num_steps: steps of one round.
        num_rounds: rounds that count, after one that does not.
    """

    num_requests: int
    prompt_len: int
    kv_budget: int
    interval: int
    num_steps: int
    num_rounds: int

    @property
    def prompt_lens(self) -> list[int]:
        """Lengths of the prompts."""
        return [self.prompt_len + index * self.interval // self.num_requests for index in range(self.num_requests)]

    @property
    def max_tokens(self) -> int:
        """Tokens that a request can give: it outlives all rounds of both measurements."""
        return 2 * self.interval + 2 * (self.num_rounds + 1) * self.num_steps + 16


@dataclass(frozen=True, slots=True)
class Case:
    """One setting of the plugin; ``settings`` is None for plain vLLM."""

    name: str
    settings: Mapping[str, Any] | None = None
    is_judged: bool = True

    @property
    def evicts(self) -> bool:
        """Whether tokens die all the time."""
        return self.settings is not None and self.settings.get("when") == "always"


STOCK = Case("stock")


def cases(load: Load) -> list[Case]:
    """Nothing evicted; ample memory; a fixed budget, so that every token goes over an evicted one.

    Not judged: the last one, verified online; attention mass, both ways.
    """
    limits = {"kv_budget": load.kv_budget, "interval": load.interval}
    always = {"policy": "streaming_llm", **limits, "when": "always"}
    h2o = {**always, "policy": "h2o"}
    return [
        Case("none", {"policy": "none"}),
        Case("pressure", {"policy": "streaming_llm", **limits, "when": "pressure"}),
        Case("always", always),
        Case("verify", {**always, "verify": True}, is_judged=False),
        Case("mass", h2o, is_judged=False),
        Case("score pass", {**h2o, "signal_source": "score_pass"}, is_judged=False),
    ]


class Decoding:
    """An engine whose requests all decode, in steady state: an interval is over in every request."""

    def __init__(self, folder: Path, case: Case, load: Load) -> None:
        self.case = case
        longest = max(load.prompt_lens) + load.max_tokens
        self.vllm = VllmEngine(
            folder,
            case.settings,
            block_size=_BLOCK_SIZE,
            num_blocks=cdiv(5 * load.num_requests * cdiv(longest, _BLOCK_SIZE), 4) + 1,
            prefix_caching=True,
            max_model_len=longest,
            max_num_seqs=load.num_requests,
            max_num_batched_tokens=max(1024, load.num_requests),
        )
        draw = Random(0)
        for length in load.prompt_lens:
            self.vllm.submit([draw.randrange(3, 200) for _ in range(length)], load.max_tokens)
        while len(self.vllm.scheduler.running) < load.num_requests or self._is_prefilling:
            self.step()
        for _ in range(load.interval if case.evicts else 2):
            self.step()

    def step(self) -> None:
        """One token for every request."""
        self.vllm.engine.step()

    @property
    def hooked(self) -> list[object]:
        """What may have hooks of the plugin's."""
        vllm = self.vllm
        manager = vllm.scheduler.kv_cache_manager.coordinator.single_type_managers[0]
        worker = vllm.engine.engine_core.engine_core.model_executor.driver_worker.worker
        return [vllm.scheduler, manager, worker, *vllm.runner.hooked]

    @property
    def counts(self) -> dict[str, int]:
        """Tokens evicted and recycled so far."""
        counters = self.vllm.scheduler.vtoken.counters
        return {"evicted": counters.num_evicted_tokens, "recycled": counters.num_recycled_tokens}

    def close(self) -> None:
        """Ends the engine."""
        self.vllm.close()

    @property
    def _is_prefilling(self) -> bool:
        return any(request.is_prefill_chunk for request in self.vllm.scheduler.running)


@dataclass(frozen=True, slots=True)
class Hook:
    """What one hook took, a step.

    Attributes:
        gross_us: in the hook.
        replaced_us: in vLLM's own method, for the calls that the hook answered by itself.
        calls, answered: all calls; those among them that did not go on to vLLM's method.
    """

    gross_us: float
    replaced_us: float
    calls: float
    answered: float


@dataclass(slots=True)
class Clocked:
    """One case's rounds, a figure a round.

    Attributes:
        case: whose.
        added_us: ``gross_us`` less ``replaced_us``.
        gross_us: processor time in all hooks, a step: the hooks' share of the step by the clock, times the processor
            time of a step, so that what other processes take meanwhile is not in it.
        replaced_us: the same of vLLM's own methods that did not run, since hooks answered.
        percent: share of ``added_us`` in the step.
        step_us: processor time of a step.
        hooks: by hook; over all rounds.
        counts: tokens evicted and recycled in all rounds.
    """

    case: Case
    added_us: list[float] = field(default_factory=list)
    gross_us: list[float] = field(default_factory=list)
    replaced_us: list[float] = field(default_factory=list)
    percent: list[float] = field(default_factory=list)
    step_us: list[float] = field(default_factory=list)
    hooks: dict[str, Hook] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)

    @property
    def gross_percent(self) -> list[float]:
        """Share of ``gross_us`` in the step, a round."""
        return [100 * gross / step for gross, step in zip(self.gross_us, self.step_us, strict=True)]


def own_ns(
    stock: Decoding, plugin: Decoding, load: Load, on_step: Callable[[], object] = lambda: None
) -> dict[str, float]:
    """What vLLM's own methods take a call in plain vLLM, by the hook of ``plugin`` that overrides them."""
    clock = EngineClock()
    with clock.attached(plugin.hooked, _PLUGIN):
        for _ in range(load.num_steps):
            stock.step()
            on_step()
    return clock.ns


def clocked_rounds(
    engine: Decoding, load: Load, own: Mapping[str, float], on_step: Callable[[], object] = lambda: None
) -> Clocked:
    """Watches the hooks of an engine. ``own``: of ``own_ns``.

    Raises InvariantError if it was not in the state that its case is about.
    """
    clock, result, before = HookClock(), Clocked(engine.case), engine.counts
    rounds: list[dict[str, Hook]] = []
    with clock.attached(engine.hooked, _PLUGIN):
        for number in range(load.num_rounds + 1):
            clock.clear()
            start, cpu_start = perf_counter(), process_time()
            for _ in range(load.num_steps):
                engine.step()
            wall_us, cpu_us = (perf_counter() - start) * 1e6, (process_time() - cpu_start) * 1e6
            for _ in range(load.num_steps):
                on_step()
            if not number:
                before = engine.counts
                continue
            hooks = _hooks_of(clock, own, load.num_steps, cpu_us / wall_us)
            rounds.append(hooks)
            result.gross_us.append(sum(hook.gross_us for hook in hooks.values()))
            result.replaced_us.append(sum(hook.replaced_us for hook in hooks.values()))
            result.added_us.append(result.gross_us[-1] - result.replaced_us[-1])
            result.step_us.append(cpu_us / load.num_steps)
            result.percent.append(100 * result.added_us[-1] / result.step_us[-1])
    result.hooks = _mean(rounds)
    result.counts = {name: count - before[name] for name, count in engine.counts.items()}
    if engine.case.evicts != bool(result.counts["recycled"]) or engine.case.evicts != bool(result.counts["evicted"]):
        raise InvariantError(f"overhead: case {engine.case.name!r} evicted and recycled {result.counts} tokens")
    return result


def _hooks_of(clock: HookClock, own: Mapping[str, float], num_steps: int, cpu_share: float) -> dict[str, Hook]:
    """One round. ``cpu_share``: of the time by the clock, what this process had the processor for."""
    answered, to_step = clock.answered, cpu_share / num_steps
    return {
        hook: Hook(
            gross_us=us * to_step,
            replaced_us=own.get(hook, 0.0) / 1000 * answered[hook] * to_step,
            calls=clock.calls[hook] / num_steps,
            answered=answered[hook] / num_steps,
        )
        for hook, us in clock.us.items()
    }


def _mean(rounds: Sequence[Mapping[str, Hook]]) -> dict[str, Hook]:
    """Over the rounds, the dearest hook first; one that was not called in a round took nothing there."""
    found: dict[str, Hook] = {}
    for name in dict.fromkeys(name for each in rounds for name in each):
        figures = [astuple(each[name]) for each in rounds if name in each]
        found[name] = Hook(*(sum(column) / len(rounds) for column in zip(*figures, strict=True)))
    return dict(sorted(found.items(), key=lambda item: -item[1].gross_us))


def cpu_ratios(engines: Sequence[Decoding], load: Load, on_step: Callable[[], object] = lambda: None) -> list[Spread]:
    """Processor time of a step of every engine over that of the first, within a round; rounds in turning order."""
    rounds = []
    for number in range(load.num_rounds + 1):
        first = number % len(engines)
        taken = {}
        for index in (*range(first, len(engines)), *range(first)):
            start = process_time()
            for _ in range(load.num_steps):
                engines[index].step()
            taken[index] = process_time() - start
            for _ in range(load.num_steps):
                on_step()
        rounds.append([taken[index] / taken[0] for index in range(len(engines))])
    return [Spread.of(ratios) for ratios in zip(*rounds[1:], strict=True)]
