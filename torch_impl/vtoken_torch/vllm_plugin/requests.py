"""Per-request settings: who chooses the victims of each request, and how many tokens it may keep."""

import logging
from collections.abc import Callable, Mapping
from typing import Any

from vtoken.config import VTokenConfig
from vtoken.errors import SpecError
from vtoken.reclamation.plan import TableView
from vtoken.trace import TraceEvent, VictimTrace
from vtoken.victims import Occasion, PolicyVictims, TraceVictims, VictimSource
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
        self._configs: dict[int, VTokenConfig] = {}
        self._sources: dict[int, VictimSource] = {}

    def submit(self, trace_key: int, extra_args: Mapping[str, Any] | None) -> None:
        """Registers a request. Never raises: bad settings were refused before, here they turn eviction off."""
        try:
            config = request_config(extra_args, self._default)
        except SpecError as error:
            logger.warning("request %d runs without eviction: %s", trace_key, error)
            config = VTokenConfig(policy="none")
        self._configs[trace_key] = config
        policy = usable_policy(config.policy)
        self._sources[trace_key] = self._replay or PolicyVictims(config, policy, on_event=self._on_event)

    def config(self, trace_key: int) -> VTokenConfig:
        """The request's configuration."""
        return self._configs[trace_key]

    def choose(self, table: TableView, occasion: Occasion) -> TraceEvent | None:
        """The request's victims. A policy that raises takes eviction from its request, never the engine down."""
        key = occasion.trace_key
        try:
            return self._sources[key].choose(table, occasion)
        except Exception:
            logger.exception("request %r: its policy %r failed, it goes on without", table.req_id, self.config(key))
            self._configs[key] = VTokenConfig(policy="none")
            self._sources[key] = PolicyVictims(self._configs[key], usable_policy("none"))
            return None

    def restart(self, trace_key: int) -> None:
        """The request was preempted."""
        self._sources[trace_key].restart(trace_key)

    def finish(self, trace_key: int) -> None:
        """The request has ended; nothing is kept for it."""
        source = self._sources.pop(trace_key, None)
        if source is not None:
            source.finish(trace_key)
            del self._configs[trace_key]
