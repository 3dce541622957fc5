"""A kept record of the comparison as markdown tables for the documents: a line for each shape."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

from vtoken_bench.executors.show import bound, place, quantity

__all__ = ["markdown_tables"]

_Record = Mapping[str, Any]
_SIDES, _ALL = ("jax", "torch"), ("jax", "torch", "hf")
_OPERATIONS = ("append_us", "attend_us", "fingerprint_us", "move_us")
_DECODE_HEADS = ("decode at", "step", "JAX / PyTorch", "transformers / JAX", "tokens/s", "KV", "memory", "bound by")

_MOVE_HEADS = ("moves at", "JAX, PyTorch, NumPy's rows", "JAX / PyTorch", "less a call, over memcpy", "bound by")


def markdown_tables(record: _Record) -> str:
    """Decoding, operations and moves of a JSON record, what it ran on above them, and what was left out below."""
    shapes = [(place(first), {row["name"]: row for row in rows}) for first, rows in _shapes(record["rows"])]
    decodes = [_decode(at, rows) for at, rows in shapes if "decode_step_us" in rows]
    operations = [_operations(at, rows) for at, rows in shapes if "append_us" in rows]
    moves = [_moves(at, rows["store_move_us"]) for at, rows in shapes if "store_move_us" in rows]
    parts = [
        [_about(record)],
        _table(_DECODE_HEADS, decodes),
        _table(("operations at", *(name.removesuffix("_us") for name in _OPERATIONS), "pool"), operations),
        _table(_MOVE_HEADS, moves),
        [f"- {key}: {line}" for key in ("refused", "skipped") for line in record["summary"][key]],
        _notes(record["rows"]),
    ]
    return "\n\n".join("\n".join(part) for part in parts if part)


def _shapes(rows: Sequence[_Record]) -> Iterator[tuple[_Record, list[_Record]]]:
    """The rows of each shape, behind the first of them; decoding apart from operations at the same shape."""
    for _, group in groupby(rows, lambda row: (row["name"].startswith("decode"), place(row))):
        found = list(group)
        yield found[0], found


def _about(record: _Record) -> str:
    summary, where = record["summary"], record["environment"]
    packages = ", ".join(f"{key} {where['packages'].get(key, '-')}" for key in ("jax", "torch", "transformers"))
    threads = ", ".join(f"{key} {count or 'its own'}" for key, count in summary["threads"].items())
    return (
        f"{where['cpu']}, {where['num_cpus']} CPUs; {summary['device']}, {summary['clock']} time; threads: {threads}; "
        f"{packages}; {summary['seconds'] / 60:.0f} minutes."
    )


def _decode(at: str, rows: Mapping[str, _Record]) -> tuple[str, ...]:
    step, memory = rows["decode_step_us"], rows.get("decode_memory_bytes")
    beside = step["ratios"].get("hf/jax")
    return (
        at,
        *_figures(step, _ALL),
        _spread(beside) if beside else "-",
        _values(rows["decode_tokens_per_s"], _ALL),
        _values(rows["decode_kv_bytes"], _ALL),
        _values(memory, _ALL) if memory else "-",
        bound(step),
    )


def _operations(at: str, rows: Mapping[str, _Record]) -> tuple[str, ...]:
    cells = ("; ".join((*_figures(rows[name], _SIDES), bound(rows[name]))) for name in _OPERATIONS)
    return at, *cells, _values(rows["pool_bytes"], _SIDES)


def _moves(at: str, row: _Record) -> tuple[str, ...]:
    over = [_spread(row["ratios"][key]) for key in ("jax/memcpy", "torch/memcpy") if key in row["ratios"]]
    return at, *_figures(row, (*_SIDES, "rows")), ", ".join(over) or "-", bound(row)


def _figures(row: _Record, keys: Iterable[str]) -> tuple[str, str]:
    """Times of each, and the ratio with its range."""
    return _values(row, keys), _spread(row)


def _values(row: _Record, keys: Iterable[str]) -> str:
    unit = next((unit for unit in ("us", "bytes") if row["name"].endswith(f"_{unit}")), "")
    return ", ".join(quantity(row[key]["value"], unit) for key in keys if key in row)


def _spread(figure: _Record) -> str:
    value, low, high = (quantity(each, "") for each in (figure["value"], *figure["spread"]))
    return f"{value} ({low} - {high})"


def _table(heads: Sequence[str], lines: Sequence[Sequence[str]]) -> list[str]:
    return [_line(heads), "|---" * len(heads) + "|", *map(_line, lines)] if lines else []


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _notes(rows: Sequence[_Record]) -> list[str]:
    """Each once, with the shapes that it is about."""
    about: dict[str, list[str]] = {}
    for row in rows:
        for note in row["notes"]:
            about.setdefault(note, []).append(place(row))
    return [f"- {note}: {'; '.join(places)}" for note, places in about.items()]
