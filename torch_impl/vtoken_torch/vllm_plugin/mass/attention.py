"""What the collector needs of the attention that it watches: one class for the CPU's, one for a GPU's."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from vtoken_torch.vllm_plugin.mass.queries import Ask, MassRows, ReadsKeys

if TYPE_CHECKING:
    from vtoken_torch.vllm_plugin.mass.collector import MassCollector

__all__ = ["WatchedAttention"]


class WatchedAttention(ABC):
    """The model's attention layers, which tell a collector of every step from the first one on that asks for mass."""

    @staticmethod
    def of(layers: Sequence[Any], replaces: bool) -> "WatchedAttention":
        """The kind for the layers' device.

        Args:
            layers: all of the model's, of one kind.
            replaces: rows whose attention is worked out for their mass need not be served by vLLM's kernel too.
        """
        if hasattr(layers[0], "isa"):  # the CPU backend's packing
            from vtoken_torch.vllm_plugin.mass.attention_cpu import CPUAttention

            return CPUAttention()
        from vtoken_torch.vllm_plugin.mass.attention_device import DeviceAttention  # needs Triton

        return DeviceAttention(replaces)

    @abstractmethod
    def watch(self, layers: Sequence[Any], collector: "MassCollector") -> None:
        """From now on ``collector.add`` hears of every layer that has run."""

    @abstractmethod
    def rows(
        self, asks: Sequence[Ask], metadata: Any, cache: Tensor, dead: Mapping[int, Tensor] | None
    ) -> list[MassRows]:
        """The work of one step. ``metadata``: vLLM's, by row of the batch; ``dead`` as in ``rows_of``."""

    @abstractmethod
    def reader(self, layer: Any, cache: Tensor) -> ReadsKeys:
        """Reads the layer's keys."""
