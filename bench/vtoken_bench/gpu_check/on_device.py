"""Streams and clocks of the GPU, and what stands in for them in a rehearsal."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from vtoken_torch.copy_engine.device import CopyDevice, CUDADevice
from vtoken_torch.copy_engine.fake_device import FakeDevice

if TYPE_CHECKING:
    from vtoken_bench.gpu_check.ground import Ground

__all__ = ["copy_device", "cuda_us", "graphed", "settle"]


def copy_device(device: str) -> CopyDevice:
    """CUDA's streams; those of the fake device in a rehearsal."""
    return CUDADevice(torch.device("cuda", 0)) if device == "cuda" else FakeDevice()


def settle(device: CopyDevice) -> None:
    """A rehearsal's compute runs at once, so what is queued before it has to happen first. CUDA orders its own."""
    if isinstance(device, FakeDevice):
        device.finish()


def cuda_us(work: Callable[[], object], sleep_cycles: int = 0) -> float:
    """Microseconds on the device between two events of the current stream around one call.

    The device sleeps first, so that the host gets ahead and its own work leaves no gap.
    """
    start: Any
    end: Any
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    torch.cuda.synchronize()
    if sleep_cycles:
        torch.cuda._sleep(sleep_cycles)  # type: ignore[no-untyped-call]
    start.record()
    work()
    end.record()
    end.synchronize()
    return float(1e3 * start.elapsed_time(end))


def graphed(work: Callable[[], object], ground: "Ground") -> Callable[[], object]:
    """Replays ``work`` as a CUDA graph, so that no launch of the host is in the time."""
    if ground.is_dry:
        return work
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):  # compiles and allocates outside the capture
        work()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph.replay
