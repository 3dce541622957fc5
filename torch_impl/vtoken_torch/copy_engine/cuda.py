"""Token moves on a CUDA stream of their own, beside the stream that computes.

One launch, in the order in which it is enqueued:

    compute stream:  [forward n] o forward done                         . [forward n + 1]
    copy stream:                 . [upload plan] [move] o copy done
    host:            enqueue n,  plan, launch,  fence,  wait: compute after copy done,  enqueue n + 1 ... passed: reap

``o`` records an event, ``.`` waits for one. The copies begin after the forward whose KV they read, and whose kernels
may still read what they overwrite. The next step's first KV write waits for them. Blocks given up meanwhile come back
once forward and copies are known to be done. The host waits for nothing, unless all plan buffers are under way.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from vtoken.errors import InvariantError
from vtoken.types import SlotId
from vtoken_torch.copy_engine.device import CopyDevice, Event, Mover, Plan, Stream

__all__ = ["CUDACopyEngine", "CopyTicket", "check_disjoint"]

_MIN_CAPACITY: Final = 256


@dataclass(frozen=True, slots=True)
class CopyTicket:
    """One launch, and the two events that end it: the copies', and that of the forward that came before."""

    copy_done: Event
    forward_done: Event

    def is_done(self) -> bool:
        """Whether the copies have happened. Never waits."""
        return self.copy_done.query() and self.forward_done.query()


class CUDACopyEngine:
    """Moves tokens of one cache; knows slots, not tables or blocks.

    Regime ``fenced``: blocks go to the pool with ``fence()`` as their fence number, and come back at
    ``pool.reap(engine.passed())``. So do the blocks of a request that ends while its plan is under way.

    Args:
        device: streams and events; ``CUDADevice`` or ``FakeDevice``.
        mover: enqueues the copies of one launch, all planes at once.
        own_stream: False moves on the compute stream, whose order makes all waits needless.
        num_plans: plan buffers; more launches than that under way make the host wait for the oldest.

    Attributes:
        num_launches, num_moves: so far.
        num_host_waits: launches that found all plan buffers under way.
    """

    def __init__(self, device: CopyDevice, mover: Mover, *, own_stream: bool = True, num_plans: int = 4) -> None:
        self._device, self._mover = device, mover
        self._own: Stream | None = device.make_stream() if own_stream else None
        self._plans: deque[tuple[Plan | None, Event | None]] = deque([(None, None)] * num_plans)  # oldest first
        self._last_copy: Event | None = None
        self._is_waited_for = True
        self._fences: deque[tuple[int, tuple[Event, ...]]] = deque()
        self._num_fences = self._num_passed = 0
        self.num_launches = self.num_moves = self.num_host_waits = 0

    # -- one step, in this order -------------------------------------------------------------------------------------

    def forward_done(self) -> Event:
        """Marks the compute stream behind a step's last kernel that touches KV."""
        event = self._device.make_event()
        event.record(self._device.current_stream())
        return event

    def launch(self, src: Sequence[SlotId], dst: Sequence[SlotId], after: Event | None = None) -> CopyTicket:
        """Enqueues the copies of token i from ``src[i]`` to ``dst[i]``, for all plans of a pass at once.

        Args:
            src, dst: slots; disjoint, and no destination is named twice (INV-5).
            after: of ``forward_done``, where work that touches no KV was enqueued since; else all work so far.

        Raises:
            InvariantError: INV-5.
        """
        check_disjoint(src, dst)
        stream = self._stream
        forward_done = self.forward_done() if after is None else after
        stream.wait_event(forward_done)
        plan = self._rested_plan(len(src), stream)
        self._device.fill(plan, src, dst)
        self._device.upload(plan, stream)  # on the stream that reads it
        self._device.move(plan, self._mover, stream)
        copy_done = self._device.make_event()
        copy_done.record(stream)
        self._plans.popleft()
        self._plans.append((plan, copy_done))
        self._last_copy, self._is_waited_for = copy_done, False
        self.num_launches += 1
        self.num_moves += len(src)
        return CopyTicket(copy_done, forward_done)

    def fence(self) -> int:
        """A fence number for blocks that are given up now: of all work so far, forwards and copies."""
        copies = () if self._last_copy is None else (self._last_copy,)
        self._num_fences += 1
        self._fences.append((self._num_fences, (*copies, self.forward_done())))
        return self._num_fences

    def wait(self) -> None:
        """All that is enqueued on the compute stream from here on comes after the copies (INV-3)."""
        if self._last_copy is not None and not self._is_waited_for:
            self._device.current_stream().wait_event(self._last_copy)
        self._is_waited_for = True

    def passed(self) -> int:
        """The last fence number that is passed, with all before it. Never waits."""
        while self._fences and all(event.query() for event in self._fences[0][1]):
            self._num_passed, _ = self._fences.popleft()
        return self._num_passed

    # -- parts -------------------------------------------------------------------------------------------------------

    @property
    def _stream(self) -> Stream:
        return self._device.current_stream() if self._own is None else self._own

    def _rested_plan(self, num_moves: int, stream: Stream) -> Plan:
        """The oldest buffers; no copy reads them any more."""
        plan, copy_done = self._plans[0]
        if copy_done is not None and not copy_done.query():
            self.num_host_waits += 1
            copy_done.synchronize()
        if plan is not None and plan.capacity >= num_moves:
            return plan
        return self._device.make_plan(max(_MIN_CAPACITY, 1 << num_moves.bit_length()), stream)


def check_disjoint(src: Sequence[SlotId], dst: Sequence[SlotId]) -> None:
    """INV-5 over a whole launch, copies of all requests and copy-on-write included. Raises InvariantError."""
    targets = set(dst)
    if len(src) != len(dst) or len(targets) != len(dst):
        raise InvariantError(f"INV-5: {len(src)} sources, {len(dst)} destinations, {len(targets)} of them different")
    both = targets.intersection(src)
    if both:
        raise InvariantError(f"INV-5: slots {sorted(both)[:8]} are read and written in one launch")
