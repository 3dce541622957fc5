"""The demo from its arguments to its exit code."""

import argparse
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from vtoken.config import VTokenConfig
from vtoken.errors import SpecError
from vtoken.executor import MAX_BLOCK_SIZE, Executor
from vtoken.plugins import EXECUTORS, get_plugin, plugin_names
from vtoken.policies import Signal, get_policy
from vtoken.report import check_output, write_bytes, write_json
from vtoken_bench.demo.compare import Comparison, compare, num_replayed_steps
from vtoken_bench.demo.output import staged
from vtoken_bench.demo.plot import draw
from vtoken_bench.demo.prompt import DEFAULT_TOKENS, encode_prompt, read_prompt
from vtoken_bench.demo.recording import Recording
from vtoken_bench.demo.report import Story, make_record, render_html
from vtoken_bench.demo.serving import has_vllm, pressure_record
from vtoken_bench.demo.show import print_replays, print_serving, print_text, print_verdict, results_table
from vtoken_bench.models import LoadedModel, check_model_folder, load_model
from vtoken_conformance.progress import progress_bar

__all__ = ["run_demo"]

POLICIES = ("h2o", "streaming_llm", "random")
DEFAULT_EXECUTORS = ("reference", "torch", "jax")
_RATIO = 0.5
_TAIL_TOKENS = 64
_MAX_THREADS = 8


def run_demo(arguments: argparse.Namespace) -> int:
    """Does what ``vtoken demo`` promises; returns 0 if all bytes are the same, else 1. SpecError: bad usage."""
    os.environ.setdefault("TQDM_DISABLE", "1")  # read when tqdm is imported: progress is shown here, once
    configs = _configs(arguments)
    prompt, text = read_prompt(arguments.prompt_file)
    if arguments.model:
        check_model_folder(arguments.model)
    check_output(arguments.json)
    names: Sequence[str] = list(dict.fromkeys(arguments.executor or DEFAULT_EXECUTORS))
    with staged(arguments.out) as staging:
        executors, missing = _executors(names, must_load=bool(arguments.executor))
        demo = _Demo(arguments, _progress())
        serving = demo.serve(missing)
        with demo.progress:
            model, recording = demo.record(prompt, text)
            comparison = demo.compare(recording, configs, executors)
        story = replace(_story(model, prompt, recording, missing, demo.seconds), serving=serving)
        record = make_record(comparison, recording, configs[0], story)
        _write(staging, record, comparison, recording)
        if arguments.json:
            write_json(arguments.json, record)
    _print(record, names, arguments.out)
    leaked = serving["summary"]["leaked_blocks"] if serving else 0
    return 0 if comparison.same_bytes and not leaked else 1


class _Demo:
    """The long parts, with their progress bars and clocks."""

    def __init__(self, arguments: argparse.Namespace, progress: Progress) -> None:
        self.arguments = arguments
        self.progress = progress
        self.seconds: dict[str, float] = {}

    def serve(self, missing: dict[str, str]) -> dict[str, Any] | None:
        if self.arguments.no_serving:
            return None
        with self._clock("serving"):
            try:
                return pressure_record(self.arguments.model)
            except SpecError as error:
                if not self.arguments.model and has_vllm():
                    raise
                missing["vllm"] = str(error)
                return None

    def record(self, prompt: str, text: str) -> tuple[LoadedModel, Recording]:
        arguments = self.arguments
        task = self.progress.add_task("starting", total=None)
        with self._clock("model"):
            from vtoken_bench.demo.record_run import record_run  # torch and transformers take seconds to import

            _spare_cpus()
            model = load_model(arguments.model, lambda stage: self.progress.update(task, description=stage))
        max_tokens = arguments.prompt_tokens or (None if arguments.prompt_file else DEFAULT_TOKENS)
        ids = encode_prompt(model, prompt, text, max_tokens, arguments.tokens)
        self.progress.update(task, total=len(ids) + arguments.tokens, description=f"{model.name} reads {prompt}")
        with self._clock("recording"):
            recording = record_run(
                model.model, ids, arguments.tokens, arguments.chunk, lambda count: self.progress.advance(task, count)
            )
        return model, recording

    def compare(
        self, recording: Recording, configs: Sequence[VTokenConfig], executors: dict[str, Executor]
    ) -> Comparison:
        total = num_replayed_steps(recording, len(configs), len(executors))
        task = self.progress.add_task("replaying", total=total)
        with self._clock("replays"):
            return compare(
                recording,
                configs,
                executors,
                self.arguments.block_size,
                lambda label: self.progress.update(task, advance=1, description=label),
            )

    @contextmanager
    def _clock(self, name: str) -> Iterator[None]:
        began = perf_counter()
        yield
        self.seconds[name] = perf_counter() - began


def _spare_cpus() -> None:
    """Half of the CPUs for PyTorch: its threads spin while they wait, and crawl where other work takes their CPUs."""
    import torch

    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, min(_MAX_THREADS, (os.cpu_count() or 1) // 2)))


def _configs(arguments: argparse.Namespace) -> list[VTokenConfig]:
    if arguments.ratio is not None and arguments.kv_budget is not None:
        raise SpecError("--ratio and --kv-budget are both given: give one of them")
    if arguments.block_size > MAX_BLOCK_SIZE:
        raise SpecError(f"--block-size {arguments.block_size}: give at most {MAX_BLOCK_SIZE}")
    ratio = arguments.ratio if arguments.kv_budget or arguments.ratio is not None else _RATIO
    configs = []
    for name in dict.fromkeys(arguments.policy or POLICIES):
        if name == "none":
            raise SpecError("--policy none evicts nothing, as native does in every demo: name a policy that evicts")
        unknown = get_policy(name).signals - {Signal.ATTENTION_MASS}
        if unknown:
            raise SpecError(f"--policy {name} needs {', '.join(signal.value for signal in unknown)}: not recorded here")
        configs.append(
            VTokenConfig(
                policy=name,
                eviction_ratio=ratio,
                kv_budget=arguments.kv_budget,
                interval=arguments.interval,
                when="always",
            )
        )
    return configs


def _executors(names: Sequence[str], must_load: bool) -> tuple[dict[str, Executor], dict[str, str]]:
    """Executors by name, and why the others are missing. One that was asked for must load."""
    executors: dict[str, Executor] = {}
    missing: dict[str, str] = {}
    for name in names:
        if ":" in name:
            known = ", ".join(plugin_names(EXECUTORS))
            raise SpecError(f"--executor {name}: the demo takes registered executors alone ({known}): give a name")
        try:
            executors[name] = get_plugin(EXECUTORS, name)()
        except SpecError as error:
            if must_load or name not in plugin_names(EXECUTORS):
                raise
            missing[name] = str(error)
    return executors, missing


def _story(
    model: LoadedModel, prompt: str, recording: Recording, missing: dict[str, str], seconds: dict[str, float]
) -> Story:
    ids, end = recording.token_ids, recording.prompt_len
    tail, continuation = (model.tokenizer.decode(part) for part in (ids[max(0, end - _TAIL_TOKENS) : end], ids[end:]))
    return Story(model.name, prompt, tail, continuation, missing, seconds)


def _write(folder: Path, record: dict[str, Any], comparison: Comparison, recording: Recording) -> None:
    write_json(folder / "report.json", record)
    write_bytes(folder / "report.html", render_html(record, comparison, recording).encode())
    write_bytes(folder / "held-blocks.png", draw(comparison, recording, "png"))
    for policy, trace in comparison.traces.items():
        trace.save(folder / f"victims-{policy}.jsonl")


def _print(record: dict[str, Any], executors: Sequence[str], out: Path) -> None:
    console = Console()
    if not console.is_terminal:
        console.width = 110
    if record["serving"]:
        print_serving(console, record["serving"])
    print_text(console, record)
    print_replays(console, record)
    console.print(results_table(record, executors, console.width))
    print_verdict(console, record)
    times = ", ".join(f"{name} {seconds:.0f} s" for name, seconds in record["seconds"].items())
    console.print(f"Report: {out / 'report.html'} ({times})", highlight=False, soft_wrap=True)


def _progress() -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return progress_bar(*columns)
