"""When an engine's numbers are published: at most every quarter of a second, and whenever it falls idle."""

import os
from time import monotonic
from typing import TYPE_CHECKING, Any, Protocol

from vtoken_torch.vllm_plugin.metrics.channel import ChannelWriter
from vtoken_torch.vllm_plugin.metrics.exposition import MULTIPROCESS, ProcessMetrics
from vtoken_torch.vllm_plugin.metrics.names import Values
from vtoken_torch.vllm_plugin.metrics.readings import Readings
from vtoken_torch.vllm_plugin.parts import SchedulerPart
from vtoken_torch.vllm_plugin.record import StepRecord

if TYPE_CHECKING:
    from vtoken_torch.vllm_plugin.scheduler import VTokenScheduler

__all__ = ["Publisher", "open_sink"]

_INTERVAL_S = 0.25


class _Sink(Protocol):
    def write(self, values: Values) -> None: ...

    def close(self) -> None: ...


class Publisher(SchedulerPart):
    """Hands the readings to a sink. After an engine's last request vLLM makes one more pass, so none goes unseen."""

    def __init__(self, readings: Readings, sink: _Sink) -> None:
        self._readings = readings
        self._sink = sink
        self._due = 0.0
        sink.write(readings.values())

    def pass_closed(self, output: Any, record: StepRecord) -> None:
        now = monotonic()
        if now >= self._due or self._readings.is_idle:
            self._due = now + _INTERVAL_S
            self._sink.write(self._readings.values())

    def close(self) -> None:
        self._sink.close()


def open_sink(scheduler: "VTokenScheduler") -> _Sink | None:
    """Where this engine's numbers go; None if no server shows them."""
    config = scheduler.vllm_config
    index = config.parallel_config.data_parallel_index
    labels = (config.model_config.served_model_name, str(index))
    return ProcessMetrics(labels) if MULTIPROCESS in os.environ else ChannelWriter.open(index, labels)
