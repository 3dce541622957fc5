"""Every metric by name, kind and meaning: what the server shows, and what ``vtoken stats`` looks for."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

__all__ = ["LABELS", "METRICS", "PREFIX", "Kind", "Metric", "Values"]

PREFIX = "vtoken:"
LABELS = ("model_name", "engine")
"""Labels of every metric, as vLLM's own have them."""

Values = Mapping[str, float | Mapping[str, float]]
"""Numbers by the metrics' names, some may be absent; a label of its own: a number for each of the label's values."""


class Kind(Enum):
    """How a metric moves: a gauge both ways, a counter up."""

    GAUGE = "gauge"
    COUNTER = "counter"


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric. ``name`` is without prefix and without the suffix ``_total`` that counters show."""

    name: str
    kind: Kind
    help: str
    label: str | None = None

    @property
    def full_name(self) -> str:
        """Prefix and name."""
        return PREFIX + self.name


def _gauge(name: str, text: str) -> Metric:
    return Metric(name, Kind.GAUGE, text)


def _counter(name: str, text: str, label: str | None = None) -> Metric:
    return Metric(name, Kind.COUNTER, text, label)


METRICS = (
    _gauge("pool_blocks", "Blocks of the KV pool, the null block apart."),
    _gauge("held_blocks", "Distinct blocks that requests hold."),
    _gauge("free_blocks", "Blocks that may be allocated now; cached ones without a holder are among them."),
    _gauge("in_flight_blocks", "Blocks given back whose copies are not done yet."),
    _gauge("reclaimable_blocks", "Held blocks beyond what the live tokens need."),
    _gauge("fragmentation", "Share of the held blocks' slots that hold no live token."),
    _gauge("live_tokens", "Live tokens of the running requests, shared ones counted for each."),
    _counter("evicted_tokens", "Tokens evicted."),
    _counter("recycled_slots", "Tokens written over a dying one: evicted without a copy."),
    _counter("moved_tokens", "Tokens copied to another slot."),
    _counter("moved_bytes", "Bytes of KV copied, in all layers, on all tensor-parallel ranks."),
    _counter("freed_blocks", "Blocks given back while their request ran on."),
    _counter("copied_blocks", "Free blocks taken to copy the survivors of shared or cached blocks into."),
    _counter("unhashed_blocks", "Blocks taken out of the prefix cache before they were written."),
    _counter("plans", "Reclamation plans carried out."),
    _counter("plans_refused", "Plans that were due and not made, by reason.", "reason"),
    _counter("postponed_kills", "Victims that waited a step for a free block to copy survivors into."),
    _counter("evicting_preemptions", "Preemptions of requests with evicted tokens, which are rebuilt from the first."),
    _counter("verification_failures", "Invariants found broken; shown while verification is on."),
    _counter("policy_seconds", "Seconds in which policies chose victims."),
    _counter("planner_seconds", "Seconds in which planners made plans."),
)
