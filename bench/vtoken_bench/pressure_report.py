"""The pressure benchmark's rounds as a record and as a table."""

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from rich.box import SIMPLE
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from vtoken.report import environment
from vtoken_bench.pressure import NATIVE, Load, Outcome, Setup
from vtoken_bench.timing import Spread

__all__ = ["SCHEMA", "leak_line", "load_line", "make_record", "pressure_lines", "pressure_table", "print_pressure"]

SCHEMA = "vtoken/bench-pressure/1"

Rounds = Mapping[Setup, Sequence[Outcome]]
"""Every setup's outcomes, one a round; round ``i`` of all setups ran one after the other."""

_TIMED = ("tokens_per_s", "tokens_per_cpu_s")
_HEADINGS = {
    "num_steps": "\nsteps",
    "mean_running": "running\nmean",
    "peak_running": "\npeak",
    "num_preemptions": "preemp-\ntions",
    "tokens_per_s": "\ntokens/s",
    "tokens_per_cpu_s": "tokens/\nCPU-s",
    "p50": "latency s\np50",
    "p95": "\np95",
    "p99": "\np99",
    "num_moved_tokens": "tokens\ncopied",
    "num_recycled_tokens": "tokens\nrecycled",
}
_FIRST_TO_GO = (
    "p99",
    "p95",
    "tokens_per_cpu_s",
    "num_moved_tokens",
    "num_recycled_tokens",
    "p50",
    "num_preemptions",
    "peak_running",
)
"""What a narrow table leaves out, one after the other. The record has all of it."""

_ABOUT_NAIVE = (
    "Naive's attention reads live slots only, which favours it; it pays for moves that a real one would not make, "
    "which burdens it."
)
_COUNTED = (
    "num_steps",
    "mean_running",
    "peak_running",
    "num_preemptions",
    "num_moved_tokens",
    "num_recycled_tokens",
    "num_freed_blocks",
)


def make_record(model: str, load: Load, rounds: Rounds) -> dict[str, Any]:
    """The JSON record. Ratios are taken within a round, between engines that ran next to each other."""
    policies = list(dict.fromkeys(setup.policy for setup in rounds if setup.policy))
    ratios = {policy: _ratios(policy, rounds) for policy in policies}
    outcomes = [outcome for runs in rounds.values() for outcome in runs]
    return {
        "schema": SCHEMA,
        "environment": environment(),
        "model": model,
        "load": {
            "num_requests": len(load.prompts),
            "prompt_tokens": max(map(len, load.prompts)),
            "output_tokens": load.max_tokens,
            "block_size": load.block_size,
            "num_blocks": load.num_blocks,
            "chunk": load.chunk,
            "kv_budget": load.kv_budget,
            "interval": load.interval,
        },
        "repeats": len(rounds[Setup(NATIVE)]),
        "rows": [_row(setup, runs) for setup, runs in rounds.items()],
        "ratios": ratios,
        "about_naive": _ABOUT_NAIVE,
        "summary": {
            **{
                f"ratio_vtoken_{other}": median(ratios[policy][f"vtoken_{other}"]["value"] for policy in policies)
                for other in (NATIVE, "naive")
            },
            "leaked_blocks": sum(outcome.leaked_blocks for outcome in outcomes),
            "same_schedule_in_every_repeat": all(
                len({run.scheduling for run in runs}) == 1 for runs in rounds.values()
            ),
        },
    }


def load_line(record: Mapping[str, Any]) -> str:
    """What was served, in one line."""
    load = record["load"]
    rounds = "" if record["repeats"] == 1 else f"; medians of {record['repeats']} rounds (range)"
    return (
        f"{load['num_requests']} requests of {load['prompt_tokens']} + {load['output_tokens']} tokens to "
        f"{record['model']}, a pool of {load['num_blocks']} blocks of {load['block_size']}, "
        f"budget {load['kv_budget']}{rounds}"
    )


def print_pressure(console: Console, record: Mapping[str, Any], title: str = "") -> None:
    """The record on a terminal: what was served, the table, and what it says. ``title`` is markup."""
    console.print(f"{title}{escape(load_line(record))}", highlight=False, soft_wrap=not console.is_terminal)
    console.print(pressure_table(record, console.width))
    for line in pressure_lines(record):
        console.print(escape(line), highlight=False, soft_wrap=not console.is_terminal)


def pressure_table(record: Mapping[str, Any], width: int) -> Table:
    """One row a setup: what the scheduler did, then what it gave. A narrow ``width`` shows fewer figures."""
    wide = Console(width=10_000)
    figures, to_go = list(_HEADINGS), iter(_FIRST_TO_GO)
    while wide.measure(table := _table(record, figures)).maximum > width and (left_out := next(to_go, None)):
        figures.remove(left_out)
    return table


def _table(record: Mapping[str, Any], figures: Sequence[str]) -> Table:
    table = Table(box=SIMPLE, pad_edge=False, padding=(0, 1, 0, 0))
    for heading in ("policy", "variant"):
        table.add_column(f"\n{heading}", no_wrap=True)
    for figure in figures:
        table.add_column(_HEADINGS[figure], justify="right", no_wrap=True)
    for row in record["rows"]:
        table.add_row(row["policy"] or "-", row["variant"], *(_cell(row, figure) for figure in figures))
    return table


def pressure_lines(record: Mapping[str, Any]) -> list[str]:
    """What the table says, in words: the gain of each policy, and what bounds it."""
    lines = []
    for policy, ratio in record["ratios"].items():
        gains = " and ".join(_gain(ratio[f"vtoken_{other}"], other) for other in (NATIVE, "naive"))
        lines.append(
            f"{policy}: vtoken serves {gains}. It needs fewer steps, native {ratio['fewer_steps']:.2f}x as many and "
            f"naive {ratio['fewer_steps_naive']:.2f}x: the gain that the blocks allow. With more requests in it, one "
            f"of its steps takes {ratio['dearer_step']:.2f}x native's time and {ratio['dearer_step_naive']:.2f}x "
            f"naive's. {_bound(record, policy)}"
        )
    lines.append(record["about_naive"])
    lines.append(leak_line(record))
    if not record["summary"]["same_schedule_in_every_repeat"]:
        lines.append("Repeats differ in what the scheduler did, which should not depend on the clock: see rows.")
    return lines


def leak_line(record: Mapping[str, Any]) -> str:
    """Whether the pools were whole at the end."""
    leaked = record["summary"]["leaked_blocks"]
    return f"Leaked blocks: {leaked}." if leaked else "Every block is back in the pool."


def _ratios(policy: str, rounds: Rounds) -> dict[str, Any]:
    native, naive, vtoken = (
        rounds[setup] for setup in (Setup(NATIVE), Setup("naive", policy), Setup("vtoken", policy))
    )
    over_native, over_naive = _ratio(vtoken, native), _ratio(vtoken, naive)
    fewer_steps, fewer_steps_naive = (other[0].num_steps / vtoken[0].num_steps for other in (native, naive))
    return {
        "vtoken_native": over_native,
        "vtoken_naive": over_naive,
        "naive_native": _ratio(naive, native),
        "fewer_steps": fewer_steps,
        "fewer_steps_naive": fewer_steps_naive,
        "dearer_step": fewer_steps / over_native["value"],
        "dearer_step_naive": fewer_steps_naive / over_naive["value"],
        "outputs_equal_naive": sum(a == b for a, b in zip(vtoken[0].outputs, naive[0].outputs, strict=True)),
    }


def _ratio(runs: Sequence[Outcome], others: Sequence[Outcome]) -> dict[str, Any]:
    return _figure([run.tokens_per_s / other.tokens_per_s for run, other in zip(runs, others, strict=True)])


def _row(setup: Setup, runs: Sequence[Outcome]) -> dict[str, Any]:
    return {
        "policy": setup.policy or None,
        "variant": setup.variant,
        "counts": {name: getattr(runs[0], name) for name in _COUNTED},
        **{name: _figure([getattr(run, name) for run in runs]) for name in _TIMED},
        "latency_s": {key: _figure([run.latency_s[key] for run in runs]) for key in runs[0].latency_s},
        "leaked_blocks": sum(run.leaked_blocks for run in runs),
    }


def _figure(values: Sequence[float]) -> dict[str, Any]:
    spread = Spread.of(values)
    return {"value": round(spread.median, 3), "spread": [round(spread.low, 3), round(spread.high, 3)]}


def _bound(record: Mapping[str, Any], policy: str) -> str:
    """What keeps vtoken from fewer steps still."""
    (row,) = (row for row in record["rows"] if (row["policy"], row["variant"]) == (policy, "vtoken"))
    peak, total = row["counts"]["peak_running"], record["load"]["num_requests"]
    if peak == total:
        return f"All {total} requests ran at once: the pool does not bound it."
    return f"At most {peak} of {total} requests ran at once: the pool bounds it."


def _gain(figure: Mapping[str, Any], other: str) -> str:
    low, high = figure["spread"]
    spread = f" ({low:.2f} to {high:.2f})" if low != high else ""
    return f"{figure['value']:.2f}x{spread} the tokens/s of {other}"


def _cell(row: Mapping[str, Any], figure: str) -> str:
    if figure in row["latency_s"]:
        return f"{row['latency_s'][figure]['value']:.1f}"
    if figure in _TIMED:
        median, (low, high) = row[figure]["value"], row[figure]["spread"]
        return f"{median:.1f} ({low:.0f}-{high:.0f})" if low != high else f"{median:.1f}"
    count = row["counts"][figure]
    return f"{count:,.1f}" if figure == "mean_running" else f"{count:,}"
