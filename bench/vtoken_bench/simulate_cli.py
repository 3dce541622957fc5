"""``vtoken simulate``: held blocks and the number of requests that fit, in five variants on the same victims."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from vtoken.cli import Command
from vtoken.config import VTokenConfig
from vtoken.errors import SpecError
from vtoken.report import check_output, environment, write_bytes, write_json

if TYPE_CHECKING:
    from vtoken_bench.simulation.engine import Workload
    from vtoken_bench.simulation.study import Outcome

__all__ = ["command"]

_CURVES = {"native": "native", "naive": "naive", "lazy": "lazy", "fill": "fill", "eager": "vtoken"}

_EXAMPLE = """\
example:
  vtoken simulate --prompt 4032 --output 12288 --ratio 0.5 --block-size 16 --pool-blocks 5427 --policy h2o
"""
_DESCRIPTION = """\
Drives the scheduler, token tables, planners and block pool of the engines, with no model and no KV beneath them.
Victims are chosen once for each request (scores of policies that need attention are synthetic) and replayed in five
variants:
  native   nothing is evicted
  naive    a block is freed once all its tokens are dead
  lazy     dead tokens are marked; emptying blocks are evacuated when free blocks are scarce
  fill     always packed, by copies alone
  vtoken   eager mode: always packed, by copies and by writing new tokens over dying ones
A number of requests fits if all of them, started together, run to their ends side by side.
"""


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    request = parser.add_argument_group("request and pool")
    request.add_argument("--prompt", type=int, required=True, metavar="TOKENS", help="prompt tokens of each request")
    request.add_argument("--output", type=int, required=True, metavar="TOKENS", help="output tokens of each request")
    request.add_argument("--block-size", type=int, default=16, metavar="TOKENS", help="tokens a block (%(default)s)")
    request.add_argument("--pool-blocks", type=int, required=True, metavar="BLOCKS", help="blocks that requests share")
    request.add_argument("--chunk", type=int, default=2048, metavar="TOKENS", help="prefill chunk (%(default)s)")
    victims = parser.add_argument_group("victims")
    victims.add_argument("--policy", required=True, help="who chooses them, for example h2o, random, streaming_llm")
    victims.add_argument("--ratio", type=float, help="share of the computed tokens to evict, for example 0.5")
    victims.add_argument("--kv-budget", type=int, metavar="TOKENS", help="tokens to keep, instead of --ratio")
    victims.add_argument("--interval", type=int, default=64, metavar="TOKENS", help="between evictions (%(default)s)")
    victims.add_argument("--seed", type=int, default=0, help="of scores and random choices (%(default)s)")
    output = parser.add_argument_group("output")
    output.add_argument("--mode", choices=_CURVES, default="eager", help="whose curve to print (%(default)s)")
    output.add_argument("--json", type=Path, metavar="FILE", help="also write the record to FILE")
    output.add_argument("--plot", type=Path, metavar="FILE", help="also draw all curves to FILE (.png or .svg)")


def _run(arguments: argparse.Namespace) -> int:
    from rich.console import Console

    from vtoken_bench.plot import FORMATS
    from vtoken_bench.simulation import show
    from vtoken_bench.simulation.engine import Workload

    plot: Path | None = arguments.plot
    if plot and plot.suffix[1:] not in FORMATS:
        raise SpecError(f"--plot {plot}: end the name in {' or '.join('.' + name for name in FORMATS)}")
    check_output(arguments.json, plot)
    workload = Workload(
        arguments.prompt, arguments.output, arguments.block_size, arguments.pool_blocks, arguments.chunk
    )
    config = VTokenConfig(
        policy=arguments.policy,
        eviction_ratio=arguments.ratio,
        kv_budget=arguments.kv_budget,
        interval=arguments.interval,
        seed=arguments.seed,
        when="always",
    )
    outcomes = _study(config, workload)
    console = Console()
    curve = _CURVES[arguments.mode]
    show.print_curve(console, curve, outcomes[curve], outcomes["native"])
    show.print_summary(console, outcomes, workload)
    if arguments.json:
        record = show.record(outcomes, config, workload)
        write_json(arguments.json, {**record, "environment": environment()})
    if plot:
        write_bytes(plot, show.picture(outcomes, config, plot.suffix[1:]))
    return 0


def _study(config: VTokenConfig, workload: "Workload") -> "dict[str, Outcome]":
    from rich.progress import BarColumn, TextColumn, TimeElapsedColumn

    from vtoken_bench.simulation.study import Study
    from vtoken_conformance.progress import progress_bar

    with progress_bar(TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn()) as progress:
        task = progress.add_task("starts", total=1.0)
        study = Study(config, workload, lambda label, share: progress.update(task, description=label, completed=share))
        return dict(study.outcomes())


command = Command(
    help="how many requests fit a pool, and what they hold, in five variants",
    add_arguments=_add_arguments,
    run=_run,
    description=_DESCRIPTION,
    epilog=_EXAMPLE,
)
