"""``vtoken bench overhead``: what the hooks add to a step of vLLM while many requests decode."""

import argparse
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vtoken.cli import Command
from vtoken.errors import SpecError
from vtoken.report import check_output, write_json
from vtoken_bench.arguments import positive
from vtoken_bench.timing import Spread

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from vtoken_bench.overhead import Case, Clocked, Load
    from vtoken_bench.record import Row

__all__ = ["command"]

SCHEMA = "vtoken/bench-overhead/1"

PERCENT_BOUND = 1.0  # of a step
ADDED_BOUND_US = 150.0  # a step at 32 requests

_DESCRIPTION = """\
Clocks inside the plugin's hooks, on the scheduler's and the worker's side, over the time of a step; vLLM's own work
that a hook calls is not counted (gross_us). Where a hook answers in place of vLLM's own method, what that takes a call
in plain vLLM, in the same run, is taken off (replaced_us); the rest is added_us, and judged. All requests decode in
one process. Cases:

  none        no policy: the hooks alone
  pressure    a policy that evicts under pressure, with ample memory
  always      a policy with a fixed budget: every request writes over an evicted token in every step
  verify      the same, every invariant checked online; not judged
  mass        h2o, whose attention mass is collected in every step; a row of its own, not judged
  score pass  h2o, which sees one query in eight; not judged

Beside it plain vLLM, plain vLLM again, and the first two cases run in turn: processor time of a step, by ratio.
"""
_FLAGS = (
    ("--requests", 32, "requests that decode at once"),
    ("--prompt", 16, "tokens of the shortest prompt; the longest has an interval more"),
    ("--kv-budget", 31, "tokens that a request keeps"),
    ("--interval", 64, "tokens between evictions"),
    ("--steps", 16, "steps of a round"),
    ("--repeats", 5, "rounds"),
)


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model", type=Path, metavar="FOLDER", help="a Llama-family Hugging Face folder (SmolLM2-135M)"
    )
    for flag, default, what in _FLAGS:
        parser.add_argument(flag, type=positive, default=default, metavar="N", help=f"{what} (%(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the record to FILE")


def _run(arguments: argparse.Namespace) -> int:
    from rich.console import Console

    from vtoken_bench.models import check_model_folder, model_name, smollm2_folder
    from vtoken_bench.overhead import Load
    from vtoken_bench.record import suite_record, suite_table
    from vtoken_bench.vllm_engine import prepare_vllm
    from vtoken_conformance.progress import progress_bar

    check_output(arguments.json)
    prepare_vllm()
    load = Load(
        arguments.requests,
        arguments.prompt,
        arguments.kv_budget,
        arguments.interval,
        arguments.steps,
        arguments.repeats,
    )
    with progress_bar() as progress:
        task = progress.add_task("starting", total=None)

        def announce(what: str) -> None:
            progress.update(task, description=what)

        folder = arguments.model or smollm2_folder(announce)
        check_model_folder(folder)
        progress.update(task, total=_num_steps(load))
        ratios, clocked, refusal = _measured(folder, load, announce, lambda: progress.advance(task))
    rows = [*_clocked_rows(clocked), *_ratio_rows(ratios)]
    summary = {**_summary(clocked, ratios), "mass": refusal or "measured"}
    console = Console()
    console.print(suite_table(f"added to a step of {model_name(arguments.model)}, {load.num_requests} requests", rows))
    for line in _verdict(summary):
        console.print(line, highlight=False, soft_wrap=True)
    if arguments.json:
        record = suite_record(SCHEMA, rows, summary)
        record["cases"] = {
            each.case.name: {
                "tokens": each.counts,
                "hooks": {hook: asdict(figures) for hook, figures in each.hooks.items()},
                "steps": load.num_steps * load.num_rounds,
            }
            for each in clocked
        }
        write_json(arguments.json, record)
    return int(not summary["within"])


def _num_steps(load: "Load") -> int:
    """Of all rounds: four engines side by side, plain vLLM and six cases under clocks."""
    return (10 * (load.num_rounds + 1) + 1) * load.num_steps


def _measured(
    folder: Path, load: "Load", announce: "Callable[[str], None]", on_step: "Callable[[], object]"
) -> "tuple[dict[str, Spread], list[Clocked], str | None]":
    """Ratios by name, figures by case, and why attention mass is not among them."""
    from vtoken_bench.overhead import STOCK, Decoding, cases, clocked_rounds, cpu_ratios, own_ns

    none, pressure, always, verify, mass, score_pass = cases(load)
    engines: list[Decoding] = []
    clocked: list[Clocked] = []
    try:
        for number, case in enumerate((STOCK, STOCK, none, pressure), start=1):
            announce(f"engine {number} of 4: {case.name}")
            engines.append(Decoding(folder, case, load))
        announce("side by side")
        _, again, *others = cpu_ratios(engines, load, on_step)
        announce("clocks: plain vLLM")
        own = own_ns(engines[0], engines[2], load, on_step)
        for engine in engines[2:]:
            announce(f"clocks: {engine.case.name}")
            clocked.append(clocked_rounds(engine, load, own, on_step))
    finally:
        for engine in engines:
            engine.close()
    refusal = _refusal(mass)
    for case in (always, verify) if refusal else (always, verify, mass, score_pass):
        announce(f"clocks: {case.name}")
        alone = Decoding(folder, case, load)
        try:
            clocked.append(clocked_rounds(alone, load, own, on_step))
        finally:
            alone.close()
    return {"stock again": again, none.name: others[0], pressure.name: others[1]}, clocked, refusal


def _refusal(case: "Case") -> str | None:
    from vtoken_torch.vllm_plugin.options import PluginOptions

    try:
        PluginOptions.from_additional_config({"vtoken": dict(case.settings or {})})
    except SpecError as error:
        return f"refused: {error}"
    return None


def _clocked_rows(clocked: "Sequence[Clocked]") -> "list[Row]":
    from vtoken_bench.record import Row

    rows = []
    for each in clocked:
        params = {"case": each.case.name}
        added, percent = (ADDED_BOUND_US, PERCENT_BOUND) if each.case.is_judged else (None, None)
        rows += [
            Row("added_us", "us", Spread.of(each.added_us), added, params),
            Row("gross_us", "us", Spread.of(each.gross_us), params=params),
            Row("replaced_us", "us", Spread.of(each.replaced_us), params=params),
            Row("overhead_percent", "%", Spread.of(each.percent), percent, params),
            Row("gross_percent", "%", Spread.of(each.gross_percent), params=params),
            Row("step_us", "us", Spread.of(each.step_us), params=params),
        ]
    return rows


def _ratio_rows(ratios: dict[str, Spread]) -> "list[Row]":
    from vtoken_bench.record import Row

    return [Row("step_over_stock", "x", spread, params={"case": name}) for name, spread in ratios.items()]


def _summary(clocked: "Sequence[Clocked]", ratios: dict[str, Spread]) -> dict[str, Any]:
    judged = [each for each in clocked if each.case.is_judged]
    percent = max(Spread.of(each.percent).median for each in judged)
    added = max(Spread.of(each.added_us).median for each in judged)
    again, hooks, pressure = ratios.values()
    return {
        "overhead_percent": percent,
        "overhead_percent_bound": PERCENT_BOUND,
        "gross_percent": max(Spread.of(each.gross_percent).median for each in judged),
        "added_us_per_step": added,
        "added_us_per_step_bound": ADDED_BOUND_US,
        "gross_us_per_step": max(Spread.of(each.gross_us).median for each in judged),
        "within": percent <= PERCENT_BOUND and added <= ADDED_BOUND_US,
        "aa_ratio": again.median,
        "aa_spread": [again.low, again.high],
        "ab_ratio": hooks.median,
        "ab_spread": [hooks.low, hooks.high],
        "pressure_ratio": pressure.median,
        "pressure_spread": [pressure.low, pressure.high],
    }


def _verdict(summary: dict[str, Any]) -> list[str]:
    colour = "green" if summary["within"] else "red"
    added, percent = summary["added_us_per_step"], summary["overhead_percent"]
    low, high = summary["aa_spread"]
    gross, gross_percent = summary["gross_us_per_step"], summary["gross_percent"]
    lines = [
        f"the worst judged case adds [{colour}]{added:.0f} us, {percent:.2f} %[/{colour}] to a step",
        f"time in the hooks: {gross:.0f} us, {gross_percent:.2f} % at most, less vLLM's own work that they spare",
        f"stock again over stock is {summary['aa_ratio']:.3f} ({low:.3f} to {high:.3f}): a ratio within says nothing",
    ]
    if summary["mass"] != "measured":
        lines.append(f"no row for attention mass, {summary['mass']}")
    return lines


command = Command(
    help="what vToken's hooks add to a step of vLLM, by clocks inside them and side by side with plain vLLM",
    add_arguments=_add_arguments,
    run=_run,
    description=_DESCRIPTION,
    epilog="Exit codes: 0 good, 1 a judged case adds more than its bound, 2 bad usage. Judge on a quiet machine.",
)
