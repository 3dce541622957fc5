"""What the copy engine needs of a device, shaped like torch.cuda: streams, events, buffers, one upload, one launch.

A ``FakeDevice`` stands in where there is none (``fake_device.py``).
"""

from collections.abc import Callable, Sequence
from typing import Any, Final, Protocol, TypeAlias

import torch
from torch import Tensor

from vtoken.types import SlotId, cdiv

__all__ = ["CUDADevice", "CopyDevice", "Event", "Mover", "Plan", "Stream"]

_HEAD: Final = 4  # words before the lists: the count, and a rest that keeps them aligned to 16 bytes

Mover: TypeAlias = Callable[[Tensor, Tensor, Tensor], None]
"""``mover(src, dst, count)`` enqueues the copies of one launch on the current stream, all planes at once.

``src``, ``dst``: int32 slots ``[num_moves]`` on the device; ``count``: int32 ``[1]`` there, so that nothing waits.
"""


class Event(Protocol):
    """A point in a stream."""

    def record(self, stream: Any) -> None:
        """Here, behind all that is enqueued in ``stream``."""
        ...

    def query(self) -> bool:
        """Whether the device has passed it. Never waits."""
        ...

    def synchronize(self) -> None:
        """The host waits until it has."""
        ...


class Stream(Protocol):
    """Work that happens in order."""

    def wait_event(self, event: Any) -> None:
        """What is enqueued from here on comes after ``event`` as recorded last; nothing if it never was."""
        ...


class Plan:
    """Slots of one launch, in pinned host memory and on the device: ``[count, -, -, - | sources | targets]`` int32.

    Both lists begin at a multiple of 16 bytes.
    """

    def __init__(self, pinned: Tensor, on_device: Tensor) -> None:
        self.capacity = (len(pinned) - _HEAD) // 2
        self._pinned, self._on_device = pinned, on_device
        self._words = pinned.numpy()
        self._num_moves = 0

    @staticmethod
    def num_words(capacity: int) -> int:
        """Length of both buffers for up to ``capacity`` moves."""
        return _HEAD + 2 * _aligned(capacity)

    def fill(self, src: Sequence[SlotId], dst: Sequence[SlotId]) -> None:
        """The host writes the pinned buffer."""
        self._num_moves = count = len(src)
        self._words[0] = count
        self._words[_HEAD : _HEAD + count] = src
        self._words[self._targets : self._targets + count] = dst

    def upload(self) -> None:
        """Enqueues one copy to the device on the current stream, as long as the plan is."""
        end = self._targets + self._num_moves
        self._on_device[:end].copy_(self._pinned[:end], non_blocking=True)

    def lists(self) -> tuple[Tensor, Tensor, Tensor]:
        """Sources, targets and count on the device, as a ``Mover`` takes them."""
        words, count = self._on_device, self._num_moves
        return words[_HEAD : _HEAD + count], words[self._targets : self._targets + count], words[:1]

    @property
    def _targets(self) -> int:
        return _HEAD + _aligned(self._num_moves)


class CopyDevice(Protocol):
    """Every call but ``fill`` enqueues and returns."""

    def make_stream(self) -> Stream: ...

    def make_event(self) -> Event: ...

    def make_plan(self, capacity: int, stream: Any) -> Plan:
        """Buffers for up to ``capacity`` moves, whose copy on the device ``stream`` alone will use."""
        ...

    def current_stream(self) -> Stream:
        """The one that computes."""
        ...

    def fill(self, plan: Plan, src: Sequence[SlotId], dst: Sequence[SlotId]) -> None:
        """The host writes the plan's pinned buffer, at once."""
        ...

    def upload(self, plan: Plan, stream: Any) -> None:
        """The plan goes to the device."""
        ...

    def move(self, plan: Plan, mover: Mover, stream: Any) -> None:
        """Copies as the plan on the device says."""
        ...


class CUDADevice:
    """torch.cuda."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def make_stream(self) -> Stream:
        stream: Stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        return stream

    def make_event(self) -> Event:
        event: Event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        return event

    def make_plan(self, capacity: int, stream: Any) -> Plan:
        size = Plan.num_words(capacity)
        pinned = torch.empty(size, dtype=torch.int32, pin_memory=True)
        with torch.cuda.stream(
            stream
        ):  # its own memory: what the allocator takes back from another may be in use there
            return Plan(pinned, torch.empty(size, dtype=torch.int32, device=self._device))

    def current_stream(self) -> Stream:
        stream: Stream = torch.cuda.current_stream(self._device)
        return stream

    def fill(self, plan: Plan, src: Sequence[SlotId], dst: Sequence[SlotId]) -> None:
        plan.fill(src, dst)

    def upload(self, plan: Plan, stream: Any) -> None:
        with torch.cuda.stream(stream):
            plan.upload()

    def move(self, plan: Plan, mover: Mover, stream: Any) -> None:
        with torch.cuda.stream(stream):
            mover(*plan.lists())


def _aligned(count: int) -> int:
    return cdiv(count, _HEAD) * _HEAD
