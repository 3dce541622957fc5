"""``vtoken demo``: the main job on a real model."""

import argparse
from pathlib import Path

from vtoken.cli import Command
from vtoken_bench.arguments import positive

__all__ = ["command"]

_DESCRIPTION = """\
First serves more requests inside vLLM than a small pool of KV blocks holds: plain, with naive eviction, with vToken.
Then runs a real model on a long prompt and records its KV cache and its attention. Policies choose their victims from
the record; every executor replays bytes and victims in four variants:
  native   nothing is evicted
  naive    a block comes back once all its tokens are dead
  lazy     dead tokens are marked; emptying blocks are evacuated
  eager    always packed, by copies and by writing new tokens over dying ones
Shows what each holds, and whether every executor still has the recorded bytes of every live token. Writes report.html,
report.json, held-blocks.png and the victim traces.
"""
_EPILOG = """\
examples:
  vtoken demo
  vtoken demo --prompt-file README.md --tokens 64 --policy tova --policy snapkv
exit codes: 0 same bytes, 1 a difference or a leaked block, 2 bad usage"""


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    run = parser.add_argument_group("run")
    run.add_argument("--model", type=Path, metavar="FOLDER", help="a Llama-family Hugging Face folder (SmolLM2-135M)")
    run.add_argument("--prompt-file", type=Path, metavar="FILE", help="text to read (source of Python's heapq)")
    run.add_argument("--prompt-tokens", type=positive, metavar="N", help="cut the prompt (2000, or the whole file)")
    run.add_argument("--tokens", type=positive, default=256, metavar="N", help="tokens to generate (%(default)s)")
    run.add_argument("--chunk", type=positive, default=256, metavar="N", help="prompt tokens a step (%(default)s)")
    victims = parser.add_argument_group("victims and pool")
    names = "h2o, streaming_llm, random"
    victims.add_argument("--policy", action="append", metavar="NAME", help=f"again for more ({names})")
    victims.add_argument("--ratio", type=float, metavar="R", help="share of the computed tokens to evict (0.5)")
    victims.add_argument("--kv-budget", type=positive, metavar="N", help="tokens to keep, instead of --ratio")
    victims.add_argument("--interval", type=positive, default=32, metavar="N", help="between evictions (%(default)s)")
    victims.add_argument("--block-size", type=positive, default=16, metavar="N", help="tokens a block (%(default)s)")
    output = parser.add_argument_group("replay and output")
    output.add_argument("--no-serving", action="store_true", help="leave out the comparison inside vLLM (2 minutes)")
    output.add_argument("--executor", action="append", metavar="NAME", help="again for more (reference, torch, jax)")
    output.add_argument(
        "--out", type=Path, default=Path("results/demo"), metavar="FOLDER", help="for the results (%(default)s)"
    )
    output.add_argument("--json", type=Path, metavar="FILE", help="also write report.json to FILE")


def _run(arguments: argparse.Namespace) -> int:
    from vtoken_bench.demo.run import run_demo  # brings torch, transformers, rich

    return run_demo(arguments)


command = Command(
    help="a real model's KV through every executor: what each variant holds, and that bytes stay the same",
    add_arguments=_add_arguments,
    run=_run,
    description=_DESCRIPTION,
    epilog=_EPILOG,
)
