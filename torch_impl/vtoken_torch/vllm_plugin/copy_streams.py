"""Where a worker's copies run: on the compute stream, there with a wait for the device, or on a stream of their own."""

from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from vtoken.types import SlotId
from vtoken_torch.copy_engine import CUDACopyEngine
from vtoken_torch.copy_engine.device import CopyDevice, CUDADevice, Event
from vtoken_torch.vllm_plugin.layout import MovesTokens
from vtoken_torch.vllm_plugin.record import StepRecord

__all__ = ["OWN_STREAMS", "Copies", "CopyStream", "OwnStream", "Ticket"]


class Ticket(Protocol):
    """One launch."""

    def is_done(self) -> bool:
        """Whether its copies have happened. Never waits."""
        ...


class CopyStream(Protocol):
    """Copies tokens on one device, for one worker."""

    def launch(self, src_slots: Sequence[SlotId], dst_slots: Sequence[SlotId]) -> Ticket | None:
        """Copies token i of a step from ``src_slots[i]`` to ``dst_slots[i]``, after all work enqueued so far.

        Sources and destinations are disjoint (INV-5): any order will do. None: done as far as later work can tell.
        """
        ...

    def wait(self) -> None:
        """All compute work enqueued from here on comes after all copies launched so far (INV-3). Need not block."""
        ...

    def forward_done(self) -> None:
        """Until the next launch nothing that is enqueued touches KV: its copies need not come after that."""
        ...


class _ComputeStream:
    def __init__(self, device: torch.device, mover: MovesTokens) -> None:
        self._mover = mover

    def launch(self, src_slots: Sequence[SlotId], dst_slots: Sequence[SlotId]) -> Ticket | None:
        self._mover.move(src_slots, dst_slots)
        return None

    def wait(self) -> None:
        pass  # the stream orders it

    def forward_done(self) -> None:
        pass


class _Synchronous(_ComputeStream):
    def launch(self, src_slots: Sequence[SlotId], dst_slots: Sequence[SlotId]) -> Ticket | None:
        super().launch(src_slots, dst_slots)
        torch.accelerator.synchronize()  # vLLM makes it do nothing on the CPU
        return None


class OwnStream:
    """``CUDACopyEngine``: copies beside what follows a forward on the compute stream, sampling above all."""

    def __init__(self, device: CopyDevice, mover: MovesTokens) -> None:
        self.engine = CUDACopyEngine(device, mover.move_planned)
        self._forward_done: Event | None = None

    def launch(self, src_slots: Sequence[SlotId], dst_slots: Sequence[SlotId]) -> Ticket | None:
        return self.engine.launch(src_slots, dst_slots, self._forward_done)

    def wait(self) -> None:
        self.engine.wait()
        self._forward_done = None  # what follows touches KV

    def forward_done(self) -> None:
        self._forward_done = self.engine.forward_done()


def _on_cuda(device: torch.device, mover: MovesTokens) -> CopyStream:
    return OwnStream(CUDADevice(device), mover)


_ORDERED = {"compute": _ComputeStream, "sync": _Synchronous}
OWN_STREAMS: dict[str, Callable[[torch.device, MovesTokens], CopyStream]] = {"cuda": _on_cuda}
"""Copies on a stream of their own, by type of device."""


class Copies:
    """The copies of one worker's records, launched in their order.

    Args:
        kind: ``copy_stream`` of the options.
        device: the worker's.
        find_mover: gives the token mover; called once there are copies, when the cache is bound.
    """

    def __init__(self, kind: str, device: torch.device, find_mover: Callable[[], MovesTokens]) -> None:
        self._make = OWN_STREAMS[device.type] if kind == "own" else _ORDERED[kind]
        self._device, self._find_mover = device, find_mover
        self._stream: CopyStream | None = None
        self._number = 0
        self._pending: deque[tuple[int, Ticket]] = deque()

    def run(self, record: StepRecord) -> None:
        """Copies before anything that is enqueued from here on."""
        self._number = record.number
        if record.src_slots:
            if self._stream is None:
                self._stream = self._make(self._device, self._find_mover())
            ticket = self._stream.launch(record.src_slots, record.dst_slots)
            if ticket is not None:
                self._pending.append((record.number, ticket))
        if self._stream is not None:
            self._stream.wait()

    def forward_done(self) -> None:
        """What touches KV in this step is enqueued."""
        if self._stream is not None:
            self._stream.forward_done()

    @property
    def done_through(self) -> int:
        """Number of the last record up to which all copies have happened."""
        while self._pending and self._pending[0][1].is_done():
            self._pending.popleft()
        return self._pending[0][0] - 1 if self._pending else self._number
