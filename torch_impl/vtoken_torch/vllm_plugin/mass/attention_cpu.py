"""vLLM's CPU attention, and after it the mass of the queries that somebody asked for.

vLLM has a registry of attention backends, but it holds for the whole process, its look-ups are cached, and the CPU
ignores a custom one. So a layer's implementation is given its subclass in place, in an engine that needs it, when it
needs it: other engines of the process, and engines whose policies look at no mass, run vLLM's own class.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl

from vtoken.errors import InvariantError
from vtoken_torch.vllm_plugin.layout import probe_packing
from vtoken_torch.vllm_plugin.mass.attention import WatchedAttention
from vtoken_torch.vllm_plugin.mass.queries import Ask, KeyReader, MassRows, rows_of

if TYPE_CHECKING:
    from vtoken_torch.vllm_plugin.mass.collector import MassCollector

__all__ = ["CPUAttention", "MassAttentionImpl"]


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


class CPUAttention(WatchedAttention):
    """Every row is vLLM's; the mass is worked out beside it, from the keys in the cache."""

    def __init__(self) -> None:
        self._readers: dict[tuple[Any, ...], KeyReader] = {}

    def watch(self, layers: Sequence[Any], collector: "MassCollector") -> None:
        for layer in layers:
            owner = type(layer.impl)
            if not issubclass(owner, CPUAttentionBackendImpl):
                raise InvariantError(f"attention mass: no implementation watches {owner.__name__}")
            layer.impl.__class__ = type(f"VToken{owner.__name__}", (MassAttentionImpl, owner), {})
            layer.impl.collector = collector

    def rows(
        self, asks: Sequence[Ask], metadata: Any, cache: Tensor, dead: Mapping[int, Tensor] | None
    ) -> list[MassRows]:
        return rows_of(asks, metadata, cache.shape[2], dead)

    def reader(self, layer: Any, cache: Tensor) -> KeyReader:
        _, _, block_size, width = cache.shape
        key = layer.isa, cache.dtype, block_size, width // 2
        if key not in self._readers:
            self._readers[key] = KeyReader(probe_packing(*key)[:, : width // 2])
        return self._readers[key]
