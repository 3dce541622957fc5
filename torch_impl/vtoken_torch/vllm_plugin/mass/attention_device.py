"""vLLM's attention on a GPU, FlashAttention or Triton, and the mass of the queries that somebody asked for.

A layer's implementation is given a subclass in place, as on the CPU, unless ``backend.py`` made it one of that kind. It
runs in Python in each step: full CUDA graphs would replay attention without it, and are refused beside mass
(``on_cuda.py``); piecewise ones leave attention out.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from vtoken.errors import InvariantError
from vtoken_torch.kernels.decode_checks import MAX_HEAD_SIZE
from vtoken_torch.vllm_plugin.mass.attention import WatchedAttention
from vtoken_torch.vllm_plugin.mass.queries import Ask, MassRows
from vtoken_torch.vllm_plugin.mass.queries_device import KernelRows, Scratch, StridedKeys, device_rows

if TYPE_CHECKING:
    from vtoken_torch.vllm_plugin.mass.collector import MassCollector

__all__ = ["DeviceAttention", "watched"]


class DeviceAttention(WatchedAttention):
    """Decoding rows by the kernels, chunks in plain torch beside vLLM's.

    Attributes:
        replaces: decoding rows that ask are served by the kernels that give their mass, not by vLLM's.
    """

    def __init__(self, replaces: bool) -> None:
        """``replaces``: where the kernels serve the model."""
        self.replaces, self._keys = replaces, StridedKeys()
        self._scratch: Scratch | None = None
        self._served: list[KernelRows] = []

    def watch(self, layers: Sequence[Any], collector: "MassCollector") -> None:
        if all(_is_served(layer.impl) for layer in layers):
            self._scratch = Scratch()
        else:
            self.replaces = False
        for layer in layers:
            impl = layer.impl
            if not hasattr(impl, "collector"):  # of a backend that vLLM chose; ``CUSTOM`` brings its own
                impl.__class__ = watched(type(impl))
            impl.collector, impl.attention = collector, self

    def rows(
        self, asks: Sequence[Ask], metadata: Any, cache: Tensor, dead: Mapping[int, Tensor] | None
    ) -> list[MassRows]:
        if dead:
            raise InvariantError("attention mass on a device: its kernels are told of no dead slots yet")
        rows = device_rows(asks, metadata, cache, self._scratch)
        self._served = [each for each in rows if isinstance(each, KernelRows)]
        return rows

    def put(self, output: Tensor) -> None:
        """Writes the attention of the rows that the kernels served over vLLM's."""
        for rows in self._served:
            rows.put(output)

    def reader(self, layer: Any, cache: Tensor) -> StridedKeys:
        return self._keys


def _is_served(impl: Any) -> bool:
    return not impl.logits_soft_cap and impl.sinks is None and impl.head_size <= MAX_HEAD_SIZE


def watched(owner: type) -> Any:
    """A class of vLLM's implementations that tells its ``collector``, if it has one, of each time it has run."""

    class WatchedImpl(owner):
        collector: "MassCollector | None" = None
        attention: DeviceAttention

        def forward(
            self,
            layer: Any,
            query: Tensor,
            key: Tensor,
            value: Tensor,
            kv_cache: Tensor,
            attn_metadata: Any,
            output: Tensor,
            *args: Any,
            **kwargs: Any,
        ) -> Tensor:
            """vLLM's kernel runs unless every row of the step is ours. The step's keys are in the cache already."""
            collector = self.collector
            num_asks = 0 if attn_metadata is None or collector is None else collector.num_asks
            is_plain = not any(each is not None for each in (*args, *kwargs.values()))  # no quantized output
            is_ours = bool(num_asks) and self.attention.replaces and is_plain
            if not is_ours or num_asks < attn_metadata.num_actual_tokens:
                output = super().forward(layer, query, key, value, kv_cache, attn_metadata, output, *args, **kwargs)
            if collector is not None and num_asks:
                collector.add(layer, query, kv_cache, attn_metadata)
            if is_ours:
                self.attention.put(output)
            return output

    WatchedImpl.__name__ = WatchedImpl.__qualname__ = f"VToken{owner.__name__}"
    return WatchedImpl
