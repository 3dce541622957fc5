"""The demo's results as a JSON record and as one HTML page that needs nothing from outside itself."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from importlib import resources
from typing import Any

from vtoken.config import VTokenConfig
from vtoken.report import environment
from vtoken_bench.demo.compare import NATIVE, Comparison, Row
from vtoken_bench.demo.drive import pool_blocks
from vtoken_bench.demo.plot import draw, inline_svg
from vtoken_bench.demo.recording import Recording
from vtoken_bench.demo.replay import Replay
from vtoken_bench.pressure_report import leak_line

__all__ = ["SCHEMA", "Story", "differences", "make_record", "render_html"]

SCHEMA = "vtoken/demo/1"


@dataclass(frozen=True, slots=True)
class Story:
    """What was run: names, texts, and what could not take part (executor -> why)."""

    model: str
    prompt: str
    prompt_tail: str
    continuation: str
    missing: Mapping[str, str]
    seconds: Mapping[str, float]
    serving: Mapping[str, Any] | None = None  # the record of ``vtoken bench pressure``


def make_record(comparison: Comparison, recording: Recording, config: VTokenConfig, story: Story) -> dict[str, Any]:
    """The JSON record. ``config`` is any policy's: what is reported of it is common to all."""
    block_size = comparison.native.block_size
    num_layers, _, num_kv_heads, head_size = recording.kv.shape[1:]
    return {
        "schema": SCHEMA,
        "environment": environment(),
        "model": {
            "name": story.model,
            "num_layers": num_layers,
            "num_query_heads": recording.num_query_heads,
            "num_kv_heads": num_kv_heads,
            "head_size": head_size,
            "kv_dtype": str(recording.kv.dtype),
            "kv_bytes_per_token": recording.kv[0].nbytes,
        },
        "run": {
            "prompt": story.prompt,
            "prompt_tokens": recording.prompt_len,
            "chunks": sum(step.is_chunk for step in recording.steps),
            "decoded_tokens": recording.num_tokens - recording.prompt_len,
            "prompt_tail": story.prompt_tail,
            "continuation": story.continuation,
        },
        "settings": {
            "eviction_ratio": config.eviction_ratio,
            "kv_budget": config.kv_budget,
            "interval": config.interval,
            "block_size": block_size,
            "pool_blocks": pool_blocks(recording, block_size),
            "cooldown_steps": config.cooldown_steps,
        },
        "missing_executors": dict(story.missing),
        "serving": story.serving,
        "rows": [_row(row) for row in comparison.rows],
        "series": _series(comparison, recording),
        "summary": _summary(comparison),
        "seconds": {name: round(seconds, 2) for name, seconds in story.seconds.items()},
    }


def differences(comparison: Comparison) -> list[str]:
    """The first difference of each replay that had one, in words."""
    return [
        f"{row.policy or 'no policy'}, {row.variant}, {name}: {done.difference}"
        for row in comparison.rows
        for name, done in row.replays.items()
        if done.difference is not None
    ]


def render_html(record: Mapping[str, Any], comparison: Comparison, recording: Recording) -> str:
    """The page: the record in words, with the picture of held blocks in it."""
    from jinja2 import Environment, StrictUndefined
    from markupsafe import Markup

    source = resources.files(__package__).joinpath("report.html.j2").read_text(encoding="utf-8")
    template = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    picture = Markup(inline_svg(draw(comparison, recording, "svg")))
    serving = record["serving"]
    leaks = leak_line(serving) if serving else ""
    return template.from_string(source).render(record=record, picture=picture, leak_line=leaks)


def _row(row: Row) -> dict[str, Any]:
    return {
        "policy": row.policy or None,
        "variant": row.variant,
        "held_blocks_end": row.held_end,
        "held_blocks_peak": row.held_peak,
        "ideal_blocks_end": row.ideal[-1],
        "live_tokens_end": row.blocks.live[-1],
        "utilization_end": round(row.utilization, 4),
        **asdict(row.blocks.counters),
        "same_bytes": row.same_bytes,
        "executors": {name: _replay(done) for name, done in row.replays.items()},
    }


def _replay(done: Replay) -> dict[str, Any]:
    return {"same_bytes": done.same_bytes, **asdict(done), "seconds": round(done.seconds, 3)}


def _series(comparison: Comparison, recording: Recording) -> dict[str, Any]:
    """After each step: tokens computed, and blocks held by each variant under each policy (native under none)."""
    held: dict[str, dict[str, list[int]]] = {}
    ideal: dict[str, list[int]] = {}
    for row in comparison.rows:
        held.setdefault(row.policy or "none", {})[row.variant] = list(row.blocks.held)
        ideal[row.policy or "none"] = list(row.ideal)
    computed = [step.end for step in recording.steps]
    return {"computed_tokens": computed, "held_blocks": held, "ideal_blocks": ideal}


def _summary(comparison: Comparison) -> dict[str, Any]:
    native = comparison.native.held_end
    saved: dict[str, dict[str, int]] = {}
    for row in comparison.rows:
        if row.variant != NATIVE:
            saved.setdefault(row.policy, {})[row.variant] = native - row.held_end
    replays = [done for row in comparison.rows for done in row.replays.values()]
    return {
        "same_bytes": comparison.same_bytes,
        "differences": differences(comparison),
        "num_replays": len(replays),
        "num_checks": sum(done.num_checks for done in replays),
        "native_blocks": native,
        "saved_blocks": saved,
    }
