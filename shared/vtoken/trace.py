"""Victim traces: which tokens died when, recorded in one run and replayed in any other (SPEC K-4).

JSONL, one object a line. The first is the header, ``{"schema": "vtoken/victims/1", ...}`` with free metadata, which no
replay reads; each other one is an event. Requests are named by ``trace_key``, the index of their submission, never by
an engine's own id.
"""

import json
import reprlib
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from vtoken.errors import SpecError
from vtoken.types import Position

__all__ = ["SCHEMA", "TraceEvent", "TraceWriter", "VictimTrace"]

SCHEMA = "vtoken/victims/1"


@dataclass(frozen=True, slots=True)
class TraceEvent:
    """Victims chosen at one computed count; ``died[i]`` is the count at which ``chosen[i]`` dies."""

    trace_key: int
    at_computed: int
    chosen: tuple[Position, ...]
    died: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.chosen) != len(self.died):
            raise SpecError(f"trace event at {self.at_computed}: {len(self.chosen)} victims, {len(self.died)} deaths")
        if self.chosen and max(self.chosen) >= self.at_computed:
            raise SpecError(f"trace event at {self.at_computed}: it chooses tokens that are not computed yet")
        if self.died and min(self.died) < self.at_computed:
            raise SpecError(f"trace event at {self.at_computed}: a victim dies before it is chosen")


@dataclass(slots=True)
class VictimTrace:
    """A trace in memory: header metadata, events by ``trace_key`` in the order of their counts, and what was odd."""

    meta: dict[str, Any] = field(default_factory=dict)
    events: dict[int, list[TraceEvent]] = field(default_factory=lambda: defaultdict(list))
    warnings: list[str] = field(default_factory=list)

    def add(self, event: TraceEvent) -> None:
        """Appends an event; counts of one key must not go back."""
        known = self.events[event.trace_key]
        if known and event.at_computed < known[-1].at_computed:
            raise SpecError(
                f"trace key {event.trace_key}: event at {event.at_computed} comes after {known[-1].at_computed}"
            )
        known.append(event)

    @classmethod
    def load(cls, path: Path) -> Self:
        """Reads a trace. A torn last line (a run cut off) is reported in ``warnings``; any other fault raises."""
        lines = _read_text(path).split("\n")
        trace = cls()
        for number, line in enumerate(lines, start=1):
            if not line:
                continue
            is_last = number == len(lines)  # a whole line ends in a newline, so that the last piece is empty
            try:
                record = json.loads(line)
            except ValueError as error:  # a JSONDecodeError, or a number of thousands of digits
                if not is_last or number == 1:
                    raise SpecError(f"{path}:{number}: not a JSON line ({error}): the trace is damaged") from None
                trace.warnings.append(f"{path}:{number}: torn last line left out ({len(line)} characters)")
                break
            if number == 1:
                trace.meta = _checked_header(path, record)
            else:
                trace._add_record(f"{path}:{number}", record)
        if not trace.meta:
            raise SpecError(f"{path}: empty; a trace begins with a header line")
        return trace

    def _add_record(self, where: str, record: Any) -> None:
        try:
            self.add(_event(record))
        except SpecError as error:
            raise SpecError(f"{where}: no trace event: {error}: record the trace again") from None

    def save(self, path: Path) -> None:
        """Writes the whole trace."""
        with TraceWriter(path, self.meta) as writer:
            for event in _in_order(self.events):
                writer.write(event)


class TraceWriter:
    """Appends events to a file as they happen; each line is whole once written."""

    def __init__(self, path: Path, meta: Mapping[str, Any]) -> None:
        self._file = path.open("w", encoding="utf-8")
        self._put({**meta, "schema": SCHEMA})

    def write(self, event: TraceEvent) -> None:
        """Appends one event."""
        self._put(asdict(event))

    def _put(self, record: Mapping[str, Any]) -> None:
        self._file.write(json.dumps(record, separators=(",", ":")) + "\n")
        self._file.flush()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise SpecError(f"{path}: no text ({error}): give a victim trace, a file of JSON lines") from None


def _checked_header(path: Path, record: Any) -> dict[str, Any]:
    schema = record.get("schema") if isinstance(record, dict) else None
    if schema != SCHEMA:
        raise SpecError(f"{path}: schema {schema!r}, this version reads {SCHEMA!r}: record the trace again")
    return dict(record)


def _event(record: Any) -> TraceEvent:
    if not isinstance(record, dict):
        raise SpecError(f"{reprlib.repr(record)} is no JSON object")
    for key in ("trace_key", "at_computed", "chosen", "died"):
        if key not in record:
            raise SpecError(f"{key} is missing")
    return TraceEvent(
        _number("trace_key", record["trace_key"]),
        _number("at_computed", record["at_computed"]),
        _numbers("chosen", record["chosen"]),
        _numbers("died", record["died"]),
    )


def _number(name: str, value: Any) -> int:
    if type(value) is not int or value < 0:  # a bool is an int to isinstance
        raise SpecError(f"{name} is {reprlib.repr(value)}, not an integer of at least 0")
    return value


def _numbers(name: str, values: Any) -> tuple[int, ...]:
    if not isinstance(values, list):
        raise SpecError(f"{name} is {reprlib.repr(values)}, not a list")
    return tuple(_number(f"{name}[{index}]", value) for index, value in enumerate(values))


def _in_order(events: Mapping[int, Iterable[TraceEvent]]) -> list[TraceEvent]:
    return sorted((event for key in events for event in events[key]), key=lambda event: event.at_computed)
