"""Per-request settings: who chooses the victims of each request, and how many tokens it may keep."""

import logging
from collections.abc import Callable, Mapping
from typing import Any

from vtoken.config import VTokenConfig
from vtoken.policies import Signal
from vtoken.reclamation.plan import TableView
from vtoken.trace import TraceEvent, VictimTrace
from vtoken.types import ReqId
from vtoken.victims import Occasion, PolicyVictims, TraceVictims, VictimSource
from vtoken_torch.vllm_plugin.mass.book import MassBook
from vtoken_torch.vllm_plugin.mass.orders import Question
from vtoken_torch.vllm_plugin.mass.victims import MassVictims
from vtoken_torch.vllm_plugin.metrics.clocks import Stopwatch, TimedVictims
from vtoken_torch.vllm_plugin.options import request_config, usable_policy

__all__ = ["RequestVictims"]

logger = logging.getLogger("vllm.vtoken")


class RequestVictims:
    """A ``VictimSource`` that asks each request's own policy, or one trace for all.

    Requests are named by their submission index (``trace_key``), the same in every paired run.
    """

    def __init__(
        self,
        default: VTokenConfig,
        replay: VictimTrace | None = None,
        on_event: Callable[[TraceEvent], None] | None = None,
    ) -> None:
        self._default = default
        self._replay = TraceVictims(replay) if replay is not None else None
        self._on_event = on_event
        self.choosing = Stopwatch()
        self.mass = MassBook()
        self._configs: dict[int, VTokenConfig] = {}
        self._sources: dict[int, VictimSource] = {}

    def submit(self, trace_key: int, extra_args: Mapping[str, Any] | None) -> None:
        """Registers a request. Never raises: bad settings were refused before, here they turn eviction off."""
        try:
            config = request_config(extra_args, self._default)
        except Exception as error:  # whatever a client sends, the engine goes on
            logger.warning("request %d runs without eviction: %s", trace_key, error)
            config = VTokenConfig(policy="none")
        try:
            source = self._replay or self._asked(trace_key, config)
        except Exception:
            logger.exception("request %d: its policy %r failed, it runs without", trace_key, config.policy)
            config = VTokenConfig(policy="none")
            source = self._asked(trace_key, config)
        self._configs[trace_key], self._sources[trace_key] = config, source

    def config(self, trace_key: int) -> VTokenConfig:
        """The request's configuration."""
        return self._configs[trace_key]

    def choose(self, table: TableView, occasion: Occasion) -> TraceEvent | None:
        """The request's victims. A policy that raises takes eviction from its request, never the engine down."""
        key = occasion.trace_key
        try:
            return self._sources[key].choose(table, occasion)
        except Exception:
            self._without(key, table.req_id)
            return None

    def question(self, table: TableView, occasion: Occasion, lead: int) -> Question | None:
        """What to ask the workers about the request's mass (``MassVictims.question``)."""
        source = self._sources[occasion.trace_key]
        if not isinstance(source, MassVictims):
            return None
        try:
            return source.question(table, occasion, lead)
        except Exception:
            self._without(occasion.trace_key, table.req_id)
            return None

    def next_count(self, trace_key: int, must_evict: bool = False) -> int | None:
        """The lowest count at which the request's next decode step may bring victims."""
        return self._sources[trace_key].next_count(trace_key, must_evict)

    def restart(self, trace_key: int, num_computed: int) -> None:
        """The request was preempted."""
        self._sources[trace_key].restart(trace_key, num_computed)

    def finish(self, trace_key: int) -> None:
        """The request has ended; nothing is kept for it."""
        source = self._sources.pop(trace_key, None)
        if source is not None:
            source.finish(trace_key)
            del self._configs[trace_key]

    def _asked(self, trace_key: int, config: VTokenConfig) -> VictimSource:
        """The request's own policy; mass is collected where it looks at any."""
        policy = usable_policy(config.policy)
        if Signal.ATTENTION_MASS not in policy.signals or config.variant == "native":
            return TimedVictims(config, policy, on_event=self._on_event, stopwatch=self.choosing)
        self.mass.open(trace_key, policy.mass_need(config))
        return MassVictims(self.mass, config, policy, self.mass.scores, self._on_event, stopwatch=self.choosing)

    def _without(self, trace_key: int, req_id: ReqId) -> None:
        """The policy has just raised: the request goes on without eviction."""
        logger.exception("request %r: its policy %r failed, it goes on without", req_id, self.config(trace_key))
        self._sources[trace_key].finish(trace_key)
        self._configs[trace_key] = VTokenConfig(policy="none")
        self._sources[trace_key] = PolicyVictims(self._configs[trace_key], usable_policy("none"))
