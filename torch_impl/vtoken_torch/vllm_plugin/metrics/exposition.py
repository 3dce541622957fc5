"""Numbers of the engines in ``prometheus_client``'s shapes.

vLLM serves ``/metrics`` in one of two ways. One API server shows its own process's registry: a collector there reads
what the engines publish over the channel. Several API servers show the files of ``PROMETHEUS_MULTIPROC_DIR``, which
vLLM sets and removes: there each engine's process keeps ordinary metrics, and collectors are not asked.
"""

import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector

from vtoken_torch.vllm_plugin.metrics.channel import CHANNEL, ChannelReader
from vtoken_torch.vllm_plugin.metrics.names import LABELS, METRICS, Kind, Metric, Values

__all__ = ["MULTIPROCESS", "EngineCollector", "ProcessMetrics", "expose_engines", "families"]

MULTIPROCESS = "PROMETHEUS_MULTIPROC_DIR"
"""Set by vLLM for several API servers, or by the user; never here: ``prometheus_client`` reads it when imported."""


def expose_engines() -> None:
    """Shows on this process's registry what engines that it starts will publish. Re-entrant; its children skip it."""
    if sys.platform == "linux" and CHANNEL not in os.environ:
        REGISTRY.register(EngineCollector(ChannelReader()))


class EngineCollector(Collector):
    """Reads the channel whenever ``/metrics`` is asked for."""

    def __init__(self, channel: ChannelReader) -> None:
        self._channel = channel

    def collect(self) -> Iterable[Family]:
        """The families; none before an engine has published."""
        engines = self._channel.read()
        return families(engines) if engines else ()


def families(engines: Sequence[tuple[tuple[str, ...], Values]]) -> Iterator[Family]:
    """The metrics of engines, each given by the values of its ``LABELS`` and its numbers."""
    for metric in METRICS:
        kind = GaugeMetricFamily if metric.kind is Kind.GAUGE else CounterMetricFamily
        family = kind(metric.full_name, metric.help, labels=_label_names(metric))
        for labels, values in engines:
            for own_label, value in _samples(metric, values):
                family.add_metric((*labels, *own_label), value)
        yield family


class ProcessMetrics:
    """Ordinary metrics of the engine's process, fed with the engine's running totals."""

    def __init__(self, labels: tuple[str, ...], registry: CollectorRegistry = REGISTRY) -> None:
        self._labels = labels
        self._metrics = {metric: _process_metric(metric, registry) for metric in METRICS}
        self._seen: dict[tuple[str, tuple[str, ...]], float] = {}

    def write(self, values: Values) -> None:
        """Sets gauges, and raises counters by what was added since the last call."""
        for metric, shown in self._metrics.items():
            for own_label, value in _samples(metric, values):
                child = shown.labels(*self._labels, *own_label)
                if metric.kind is Kind.GAUGE:
                    child.set(value)
                    continue
                key = (metric.name, own_label)
                if value > self._seen.get(key, 0):
                    child.inc(value - self._seen.get(key, 0))
                    self._seen[key] = value

    def close(self) -> None:
        """The files are vLLM's to remove."""


@cache  # a registry takes a name once, and a process may make several engines one after another
def _process_metric(metric: Metric, registry: CollectorRegistry) -> Any:
    if metric.kind is Kind.COUNTER:
        return Counter(metric.full_name, metric.help, _label_names(metric), registry=registry)
    return Gauge(metric.full_name, metric.help, _label_names(metric), registry=registry, multiprocess_mode="mostrecent")


def _label_names(metric: Metric) -> tuple[str, ...]:
    return (*LABELS, metric.label) if metric.label else LABELS


def _samples(metric: Metric, values: Values) -> Iterator[tuple[tuple[str, ...], float]]:
    value = values.get(metric.name)
    if isinstance(value, Mapping):
        yield from (((label,), number) for label, number in value.items())
    elif value is not None:
        yield (), value
