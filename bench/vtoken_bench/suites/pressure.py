"""``vtoken bench pressure``: many requests, few blocks; what eviction gives inside real vLLM."""

import argparse
import ast
import inspect
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from vtoken.cli import Command
from vtoken.errors import SpecError
from vtoken.policies import get_policy
from vtoken.report import check_output, write_json
from vtoken_bench.arguments import positive

if TYPE_CHECKING:
    from rich.progress import Progress

    from vtoken_bench.pressure import Load, Outcome, Setup

__all__ = ["command", "prompts_of", "run_rounds"]

POLICIES = ("streaming_llm", "random", "h2o")

_DESCRIPTION = """\
Serves the same requests with plain vLLM (native), and with each policy twice: naive (a block comes back once all its
tokens are dead) and vtoken. All requests are there from the start; the pool holds a few of them. Engines run one after
the other in this process, every round in the same order; ratios are taken within a round.
"""


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model", type=Path, metavar="FOLDER", help="a Llama-family Hugging Face folder (SmolLM2-135M)"
    )
    parser.add_argument("--policy", action="append", metavar="NAME", help=f"again for more ({', '.join(POLICIES)})")
    for flag, default, what in (
        ("--requests", 16, "requests, all at once"),
        ("--prompt", 512, "prompt tokens of each"),
        ("--output", 256, "tokens that each generates"),
        ("--block-size", 32, "tokens a block"),
        ("--blocks", 100, "blocks of the pool, vLLM's null block included"),
        ("--chunk", 512, "most tokens of a step"),
        ("--kv-budget", 191, "tokens that a request keeps"),
        ("--interval", 16, "tokens between evictions"),
        ("--repeats", 3, "rounds"),
    ):
        parser.add_argument(flag, type=positive, default=default, metavar="N", help=f"{what} (%(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the record to FILE")


def _run(arguments: argparse.Namespace) -> int:
    check_output(arguments.json)
    policies = list(dict.fromkeys(arguments.policy or POLICIES))
    for policy in policies:
        if policy == "none":
            raise SpecError("--policy none evicts nothing, as native does in every run: name a policy that evicts")
        get_policy(policy)
    from rich.console import Console

    from vtoken_bench.models import check_model_folder, model_name, smollm2_folder
    from vtoken_bench.pressure import Load, setups
    from vtoken_bench.pressure_report import make_record, print_pressure
    from vtoken_bench.vllm_engine import prepare_vllm
    from vtoken_conformance.progress import progress_bar

    prepare_vllm()
    with progress_bar() as progress:
        task = progress.add_task("starting", total=None)
        folder = arguments.model or smollm2_folder(lambda stage: progress.update(task, description=stage))
        check_model_folder(folder)
        load = Load(
            prompts_of(folder, arguments.requests, arguments.prompt),
            arguments.output,
            arguments.block_size,
            arguments.blocks,
            arguments.chunk,
            arguments.kv_budget,
            arguments.interval,
        )
        progress.remove_task(task)
        rounds = run_rounds(folder, setups(policies), load, arguments.repeats, progress)
    record = make_record(model_name(arguments.model), load, rounds)
    console = Console()
    if not console.is_terminal:
        console.width = 160
    print_pressure(console, record)
    if arguments.json:
        write_json(arguments.json, record)
    return int(record["summary"]["leaked_blocks"] > 0)


def run_rounds(
    folder: Path, todo: "Sequence[Setup]", load: "Load", repeats: int, progress: "Progress"
) -> "dict[Setup, list[Outcome]]":
    """Every setup once a round."""
    from vtoken_bench.pressure import run_load

    rounds: dict[Setup, list[Outcome]] = {setup: [] for setup in todo}
    task = progress.add_task("", total=repeats * len(todo) * len(load.prompts) * load.max_tokens)
    for number in range(1, repeats + 1):
        for setup in todo:
            round_of = f"round {number} of {repeats}: " if repeats > 1 else ""
            progress.update(task, description=f"inside vLLM, {round_of}{setup.label}")
            rounds[setup].append(run_load(folder, setup, load, lambda count: progress.advance(task, count)))
    return rounds


def prompts_of(folder: Path, count: int, length: int) -> list[list[int]]:
    """Different prompts of ``length`` tokens each: pieces of the source of Python's ``argparse`` and ``ast``."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    text = "".join(inspect.getsource(module) for module in (argparse, ast))
    ids: list[int] = tokenizer(text, verbose=False)["input_ids"]
    if count * length > len(ids):
        raise SpecError(
            f"{count} prompts of {length} tokens are {count * length:,} tokens, the text has {len(ids):,}: "
            "ask for fewer --requests or a shorter --prompt"
        )
    return [list(ids[start : start + length]) for start in range(0, count * length, length)]


command = Command(
    help="plain vLLM, naive eviction and vToken on the same requests in one small pool",
    add_arguments=_add_arguments,
    run=_run,
    description=_DESCRIPTION,
    epilog="Exit codes: 0 good, 1 a block leaked, 2 bad usage.",
)
