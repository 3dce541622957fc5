"""vLLM's CPU attention, and after it the mass of the queries that somebody asked for.

vLLM has a registry of attention backends, but it holds for the whole process, its look-ups are cached, and the CPU
ignores a custom one. So a layer's implementation is given its subclass in place, in an engine that needs it, when it
needs it: other engines of the process, and engines whose policies look at no mass, run vLLM's own class.
"""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl

from vtoken.errors import InvariantError

if TYPE_CHECKING:
    from vtoken_torch.vllm_plugin.mass.collector import MassCollector

__all__ = ["MassAttentionImpl", "watch"]


class MassAttentionImpl(CPUAttentionBackendImpl):
    """Computes what its base computes. ``collector``: who is told of each layer that has run."""

    collector: "MassCollector"

    def forward(
        self, layer: Any, query: Any, key: Any, value: Any, kv_cache: Any, attn_metadata: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """vLLM's; the step's keys are in the cache already."""
        result = super().forward(layer, query, key, value, kv_cache, attn_metadata, *args, **kwargs)
        if attn_metadata is not None:
            self.collector.add(layer, query, kv_cache, attn_metadata)
        return result


def watch(layers: Iterable[Any], collector: "MassCollector") -> None:
    """From now on ``collector`` hears of every step of these attention layers."""
    for layer in layers:
        owner = type(layer.impl)
        if not issubclass(owner, CPUAttentionBackendImpl):
            raise InvariantError(f"attention mass: no implementation watches {owner.__name__}")
        layer.impl.__class__ = type(f"VToken{owner.__name__}", (MassAttentionImpl, owner), {})
        layer.impl.collector = collector
