"""What each step did and what became of each request, as JSONL and as a trace that Perfetto opens (ui.perfetto.dev).

JSONL: one object a line, told apart by ``kind``:

    start    once: schema, time, pool, settings
    step     each scheduling pass: blocks, fragmentation, copies, times, queue
    request  ``arrival``, ``admission``, ``trigger`` (its first tokens are evicted), ``commit`` (a plan changed its
             blocks), ``preemption``, ``readmission``, ``end``

``t`` is seconds since the start and never falls. ``event_wait_us``: where copies have a stream of their own, how long
those were under way that were reported done since the step before; else 0.

Both files are whole, valid JSON after each flush: at least once a second while steps are made, when the engine falls
idle, and at the end.
"""

import json
import logging
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, BinaryIO

from vtoken.config import VTokenConfig
from vtoken.report import check_output
from vtoken.types import ReqId
from vtoken_torch.vllm_plugin.metrics.readings import Readings
from vtoken_torch.vllm_plugin.parts import SchedulerPart
from vtoken_torch.vllm_plugin.record import StepRecord

__all__ = ["SCHEMA", "Timeline", "perfetto_path"]

SCHEMA = "vtoken/timeline/1"

logger = logging.getLogger("vllm.vtoken")

_FLUSH_S = 1.0
_STATE_AFTER = {"arrival": "queued", "admission": "running", "preemption": "preempted", "readmission": "running"}
_COUNTERS = {  # track in Perfetto -> what of a step it shows
    "blocks": ("held", "free", "in_flight"),
    "fragmentation": ("fragmentation",),
    "tokens": ("live_tokens",),
    "requests": ("running", "waiting"),
    "copied bytes": ("moved_bytes",),
    "evicted tokens": ("evicted", "recycled"),
    "microseconds": ("planner_us", "event_wait_us"),
}


def perfetto_path(path: Path) -> Path:
    """Where the trace for Perfetto lies: beside the JSONL file."""
    return path.with_suffix(".perfetto.json")


class Timeline(SchedulerPart):
    """Writes both files. Raises SpecError at once if they cannot be written; should that happen later, it stops."""

    def __init__(self, readings: Readings, path: Path, config: VTokenConfig) -> None:
        check_output(path, perfetto_path(path))
        self._readings = readings
        self._steps = 0
        self._last = (0, 0, 0.0)  # evicted and recycled tokens, planner seconds
        self._state: dict[ReqId, str] = {}
        self._untouched: set[ReqId] = set()  # requests that have lost no token yet
        self._lines: list[str] = []
        self._copying: dict[int, float] = {}  # passes whose copies are not known to be done, and when they closed
        self._wait_s = 0.0
        self._trace: list[str] = [json.dumps({"ph": "M", "name": "process_name", "pid": 0, "args": {"name": "vToken"}})]
        self._files: tuple[_Jsonl, _JsonArray] | None = (_Jsonl(path), _JsonArray(perfetto_path(path)))
        self._start = self._flushed = time.perf_counter()
        pool = {"pool_blocks": readings.blocks().total, "token_bytes": readings.token_bytes}
        self._line(kind="start", t=0.0, schema=SCHEMA, unix_time=time.time(), **pool, config=asdict(config))
        self._flush()

    # -- what the engine tells ---------------------------------------------------------------------------------------

    def request_came(self, req_id: ReqId) -> None:
        self._untouched.add(req_id)
        self._note(self._now(), req_id, "arrival")

    def request_left(self, req_id: ReqId, is_finished: bool) -> None:
        if is_finished:
            self._end(self._now(), req_id)

    def result_came(self, output: Any, result: Any) -> None:
        if self._copying:
            now, done = self._now(), self._readings.copied_through
            for number in [each for each in self._copying if each <= done]:
                self._wait_s += now - self._copying.pop(number)

    def pass_closed(self, output: Any, record: StepRecord) -> None:
        now = self._now()
        if record.src_slots and self._readings.is_fenced:
            self._copying[record.number] = now
        for req_id in output.finished_req_ids:
            self._end(now, req_id)  # of those that never ran nobody else tells
        for req_id in (*filter(record.num_evicted.get, record.num_evicted), *record.recycles, *record.live_words):
            if req_id in self._untouched:
                self._untouched.discard(req_id)
                self._note(now, req_id, "trigger")
        for req_id, block_ids in record.block_ids.items():
            self._note(now, req_id, "commit", num_blocks=len(block_ids))
        for req_id in output.preempted_req_ids or ():
            self._note(now, req_id, "preemption")
        for req_id in output.num_scheduled_tokens:
            if (state := self._state.get(req_id)) != "running":
                self._note(now, req_id, "readmission" if state == "preempted" else "admission")
        self._step(now, record)
        if now - self._flushed >= _FLUSH_S or self._readings.is_idle:
            self._flush()

    def close(self) -> None:
        """Writes what is left."""
        self._flush()
        self._end_files()

    # -- what is written ---------------------------------------------------------------------------------------------

    def _step(self, now: float, record: StepRecord) -> None:
        readings = self._readings
        blocks, (running, waiting) = readings.blocks(), readings.queue
        usage = readings.usage(blocks.held)
        totals = (readings.num_evicted_tokens, readings.num_recycled_tokens, readings.planning.seconds)
        evicted, recycled, planner_s = (total - last for total, last in zip(totals, self._last, strict=True))
        self._last = totals
        wait_s, self._wait_s = self._wait_s, 0.0
        step = {
            "step": self._steps,
            "held": blocks.held,
            "free": blocks.free,
            "in_flight": blocks.in_flight,
            "fragmentation": round(usage.fragmentation, 6),
            "live_tokens": usage.live_tokens,
            "evicted": evicted,
            "recycled": recycled,
            "moved_tokens": len(record.src_slots),
            "moved_bytes": len(record.src_slots) * readings.token_bytes,
            "planner_us": round(planner_s * 1e6, 1),
            "event_wait_us": round(wait_s * 1e6, 1),
            "running": running,
            "waiting": waiting,
        }
        self._steps += 1
        self._line(kind="step", t=now, **step)
        for track, names in _COUNTERS.items():
            self._event("C", now, name=track, args={name: step[name] for name in names})

    def _note(self, now: float, req_id: ReqId, event: str, **details: Any) -> None:
        self._line(kind="request", t=now, req_id=req_id, event=event, **details)
        if event == "arrival":
            self._slice("b", now, req_id, f"request {req_id}")
        if event not in _STATE_AFTER:
            self._slice("n", now, req_id, event, args=details)
            return
        if before := self._state.get(req_id):
            self._slice("e", now, req_id, before)
        self._state[req_id] = _STATE_AFTER[event]
        self._slice("b", now, req_id, _STATE_AFTER[event])

    def _end(self, now: float, req_id: ReqId) -> None:
        state = self._state.pop(req_id, None)
        if state is None:
            return
        self._untouched.discard(req_id)
        self._line(kind="request", t=now, req_id=req_id, event="end")
        self._slice("e", now, req_id, state)
        self._slice("e", now, req_id, f"request {req_id}")

    def _slice(self, phase: str, now: float, req_id: ReqId, name: str, **more: Any) -> None:
        self._event(phase, now, cat="request", id=req_id, name=name, **more)

    def _event(self, phase: str, now: float, **more: Any) -> None:
        self._trace.append(json.dumps({"ph": phase, "ts": round(now * 1e6, 1), "pid": 0, "tid": 0, **more}))

    def _line(self, **record: Any) -> None:
        self._lines.append(json.dumps(record))

    def _now(self) -> float:
        return round(time.perf_counter() - self._start, 7)

    def _flush(self) -> None:
        self._flushed = self._now()
        lines, self._lines = self._lines, []
        trace, self._trace = self._trace, []
        if self._files is None or not lines:
            return
        try:
            lines_file, trace_file = self._files
            lines_file.write(lines)
            trace_file.write(trace)
        except OSError as error:  # no room on the disk, for instance: the engine is worth more than its timeline
            logger.warning("vToken: the timeline ends here: %s", error)
            self._end_files()

    def _end_files(self) -> None:
        files, self._files = self._files or (), None
        for file in files:
            with suppress(OSError):  # of what a full disk did not take: that has been said
                file.close()


class _Jsonl:
    """One item a line."""

    def __init__(self, path: Path) -> None:
        self._file: BinaryIO = path.open("wb")

    def write(self, items: Sequence[str]) -> None:
        self._file.write("".join(f"{item}\n" for item in items).encode())
        self._file.flush()

    def close(self) -> None:
        self._file.close()


class _JsonArray:
    """One array, whole after each write: what comes next starts over the closing bracket."""

    def __init__(self, path: Path) -> None:
        self._file: BinaryIO = path.open("wb")
        self._end = 0

    def write(self, items: Sequence[str]) -> None:
        body = ((",\n" if self._end else "[\n") + ",\n".join(items)).encode()
        self._file.seek(self._end)
        self._file.write(body + b"\n]\n")
        self._file.flush()
        self._end += len(body)

    def close(self) -> None:
        self._file.close()
