"""A device that does not exist: it finds races, happens in the worst order, and says what ran beside what.

It takes the calls of a ``CopyDevice`` and judges them in two ways.

*Clocks* (``race_clocks``). Enqueueing takes a stream past all that the host knows; recording an event copies the
stream's clock; waiting for it, and a ``query`` that says yes, join it to the waiter's. An access that no clock puts
after a conflicting one is a ``Race``: it would be one in some order of events, whichever this run took. A yes orders
the host, and thereby all that it enqueues later, so that a device which always says yes hides a missing wait: run with
``lag`` 0, which frees as early as allowed, and with ``lag`` above, where nothing is ordered by luck.

*Data.* Work is queued with what it does, and done in an order that keeps to streams and waits alone: streams named in
``eager`` run as far ahead as they may, the others as late as they may.

Simulated time runs along: ``spans`` says what ran from when to when, for a picture. One engine is covered, not the
allocator of a framework, nor the capture of graphs.
"""

from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from vtoken.types import SlotId
from vtoken_torch.copy_engine.device import Mover, Plan
from vtoken_torch.copy_engine.race_clocks import HOST, Cell, Clock, RaceClocks

__all__ = ["Durations", "FakeDevice", "FakeEvent", "FakeStream", "Span", "Wait"]


class Span(NamedTuple):
    """Something that a stream, or the host, was busy with. Simulated time."""

    stream: str
    start: float
    end: float
    what: str


class Wait(NamedTuple):
    """A stream held back by an event of another. Simulated time at which each gets there."""

    stream: str
    start: float
    event_stream: str
    event_time: float


@dataclass(frozen=True, slots=True)
class Durations:
    """Simulated time of the copy stream's work."""

    upload: float = 0.2
    move: float = 0.5
    per_token: float = 0.02


@dataclass(slots=True)
class _Task:
    run: Callable[[], Any] | None = None
    waits_for: "tuple[FakeStream, int] | None" = None


class FakeDevice:
    """A ``CopyDevice``.

    Args:
        lag: how often an event's ``query`` says no before it says yes; None: yes once simulated time has passed it.
        eager: names of streams that run ahead. ``{"compute"}`` is a real CPU engine, whose own work happens at once.
        checks_races: whether a race raises.

    Attributes:
        compute: the current stream.
        clocks: of host and streams.
        spans, waits: in the order of the calls.
        now: simulated time of the host.
    """

    def __init__(
        self,
        lag: int | None = 0,
        *,
        eager: Collection[str] = (),
        checks_races: bool = True,
        durations: Durations | None = None,
    ) -> None:
        self.lag = lag
        self.spans: list[Span] = []
        self.waits: list[Wait] = []
        self.now = 0.0
        self._eager = frozenset(eager)
        self._durations = durations or Durations()
        self.clocks = RaceClocks(checks_races)
        self._filled: dict[Plan, tuple[Sequence[SlotId], Sequence[SlotId]]] = {}
        self._uploaded: dict[Plan, tuple[Sequence[SlotId], Sequence[SlotId]]] = {}
        self._streams: list[FakeStream] = []
        self.compute = self.make_stream("compute")

    # -- a CopyDevice ------------------------------------------------------------------------------------------------

    def make_stream(self, name: str = "copy") -> "FakeStream":
        self._streams.append(FakeStream(self, self.clocks.add(name)))
        return self._streams[-1]

    def make_event(self) -> "FakeEvent":
        return FakeEvent(self)

    def make_plan(self, capacity: int, stream: "FakeStream") -> Plan:
        size = Plan.num_words(capacity)
        return Plan(torch.zeros(size, dtype=torch.int32), torch.zeros(size, dtype=torch.int32))

    def current_stream(self) -> "FakeStream":
        return self.compute

    def fill(self, plan: Plan, src: Sequence[SlotId], dst: Sequence[SlotId]) -> None:
        self.clocks.access(HOST, "fill pinned plan", (), (("pinned", plan),))
        self._filled[plan] = src, dst
        plan.fill(src, dst)

    def upload(self, plan: Plan, stream: "FakeStream") -> None:
        self._uploaded[plan] = self._filled[plan]
        reads, writes = (("pinned", plan),), (("plan", plan),)
        self.enqueue(stream, "upload plan", reads, writes, plan.upload, self._durations.upload)

    def move(self, plan: Plan, mover: Mover, stream: "FakeStream") -> None:
        src, dst = self._uploaded[plan]
        lists = plan.lists()
        duration = self._durations.move + self._durations.per_token * len(src)
        name = f"move {len(src)} tokens"
        self.enqueue(stream, name, (*src, ("plan", plan)), dst, lambda: mover(*lists), duration)

    # -- other work --------------------------------------------------------------------------------------------------

    def enqueue(
        self,
        stream: "FakeStream",
        what: str,
        reads: Iterable[Cell] = (),
        writes: Iterable[Cell] = (),
        run: Callable[[], Any] | None = None,
        duration: float = 1.0,
    ) -> None:
        """One kernel or copy. ``run`` is called when it happens.

        Raises:
            Race: nothing puts it after a conflicting access.
        """
        self.clocks.join_host(stream.name)
        self.clocks.access(stream.name, what, reads, writes)
        start = max(stream.time, self.now)
        stream.time = start + duration
        self.spans.append(Span(stream.name, start, stream.time, what))
        self._queue(stream, _Task(run=run))

    def work(self, what: str, duration: float) -> None:
        """The host is busy."""
        self.spans.append(Span(HOST, self.now, self.now + duration, what))
        self.now += duration

    def finish(self) -> None:
        """All that is queued happens."""
        for stream in self._streams:
            stream.happen(stream.num_queued)

    # -- data --------------------------------------------------------------------------------------------------------

    def _queue(self, stream: "FakeStream", task: _Task) -> None:
        stream.tasks.append(task)
        if stream.name in self._eager:
            stream.happen(stream.num_queued)


class FakeStream:
    """A ``Stream``: a queue of work that happens in order, and the simulated time at which it is empty."""

    def __init__(self, device: FakeDevice, name: str) -> None:
        self.name = name
        self.time = 0.0
        self.tasks: deque[_Task] = deque()
        self._device = device
        self._num_happened = 0

    def wait_event(self, event: "FakeEvent") -> None:
        if event.clock is None or event.point is None:
            return  # as in CUDA: an event that was never recorded holds nobody up
        self._device.clocks.join(self.name, event.clock)
        self._device.waits.append(Wait(self.name, self.time, event.point[0].name, event.time))
        self.time = max(self.time, event.time)
        self._device._queue(self, _Task(waits_for=event.point))

    @property
    def num_queued(self) -> int:
        """Tasks so far, those that have happened included."""
        return self._num_happened + len(self.tasks)

    def happen(self, end: int) -> None:
        """Does tasks up to number ``end``, and on other streams only what they wait for."""
        while self._num_happened < end:
            task = self.tasks.popleft()
            self._num_happened += 1
            if task.waits_for is not None:
                stream, point = task.waits_for
                stream.happen(point)
            if task.run is not None:
                task.run()


class FakeEvent:
    """An ``Event``."""

    def __init__(self, device: FakeDevice) -> None:
        self._device = device
        self._num_asked = 0
        self.clock: Clock | None = None
        self.point: tuple[FakeStream, int] | None = None
        self.time = 0.0

    def record(self, stream: FakeStream) -> None:
        self.clock = self._device.clocks.of(stream.name)
        self.point = stream, stream.num_queued
        self.time = max(stream.time, self._device.now)
        self._num_asked = 0

    def query(self) -> bool:
        if self.clock is None:
            return True  # as in CUDA
        device = self._device
        self._num_asked += 1
        is_done = self.time <= device.now if device.lag is None else self._num_asked > device.lag
        if is_done:
            self.synchronize()
        return is_done

    def synchronize(self) -> None:
        if self.clock is None or self.point is None:
            return
        self._device.clocks.join(HOST, self.clock)
        self._device.now = max(self._device.now, self.time)
        stream, point = self.point
        stream.happen(point)
