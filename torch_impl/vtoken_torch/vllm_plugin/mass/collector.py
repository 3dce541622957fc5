"""Gathers a step's attention mass while vLLM's layers run."""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from vllm.distributed import tensor_model_parallel_all_reduce

from vtoken.types import ReqId
from vtoken_torch.vllm_plugin.mass.attention import WatchedAttention
from vtoken_torch.vllm_plugin.mass.queries import Ask, Heads, MassRows

if TYPE_CHECKING:
    from vtoken_torch.vllm_plugin.lazy.holes import HoleKeeper

__all__ = ["MassCollector"]


class MassCollector:
    """Watches the model's attention layers from the first step on in which a request asks for mass.

    Attributes:
        rows: the work of the step, once its first layer has run.
    """

    def __init__(
        self, layers: Callable[[], Sequence[Any]], holes: "HoleKeeper | None" = None, *, replaces: bool = True
    ) -> None:
        """``holes``: knows the dead slots, in lazy mode. ``replaces``: as in ``WatchedAttention.of``."""
        self._layers, self._holes, self._replaces = layers, holes, replaces
        self._attention: WatchedAttention | None = None
        self._asks: Sequence[Ask] = ()
        self.rows: list[MassRows] = []
        self._num_layers = 0

    def begin(self, asks: Sequence[Ask]) -> None:
        """A step. ``asks``: its rows that ask for mass."""
        self._asks, self._num_layers = asks, 0
        if asks and self._attention is None:
            layers = self._layers()
            self._attention = WatchedAttention.of(layers, self._replaces)
            self._attention.watch(layers, self)

    @property
    def num_asks(self) -> int:
        """Rows of the step that ask for mass."""
        return len(self._asks)

    @property
    def dead(self) -> Mapping[int, Tensor] | None:
        """Dead slots by row of the batch, in lazy mode."""
        return None if self._holes is None else self._holes.dead

    def add(self, layer: Any, query: Tensor, cache: Tensor, metadata: Any) -> None:
        """A layer has run. ``query``: ``[num_tokens, num_query_heads, head_size]``; its keys are in ``cache``."""
        if not self._asks or self._attention is None:
            return
        if not self._num_layers:
            self.rows = self._attention.rows(self._asks, metadata, cache, self.dead)
        impl = layer.impl
        heads, reader = Heads(impl.scale, impl.logits_soft_cap, impl.sinks), self._attention.reader(layer, cache)
        for rows in self.rows:
            rows.add(query, cache, reader, heads)
        self._num_layers += 1

    def end(self) -> dict[ReqId, Tensor]:
        """The step's mass by request, float32 ``[rows, slots]`` on the device, up to the cursor; holes are in it."""
        if not self._asks:
            return {}
        whole = torch.cat([rows.masses.flatten() for rows in self.rows]) / self._num_layers
        parts = tensor_model_parallel_all_reduce(whole).split([rows.masses.numel() for rows in self.rows])
        found: dict[ReqId, Tensor] = {}
        for rows, part in zip(self.rows, parts, strict=True):
            found.update(rows.split(part.view_as(rows.masses)))
        self._asks, self.rows = (), []
        return found
