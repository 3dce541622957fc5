"""The worker's side of attention mass: gathered while vLLM's layers run, reported with the step's result."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from vllm.distributed import tensor_model_parallel_all_reduce

from vtoken.types import ReqId
from vtoken_torch.vllm_plugin.mass.attention import WatchedAttention
from vtoken_torch.vllm_plugin.mass.queries import Ask, Heads, MassRows
from vtoken_torch.vllm_plugin.parts import WorkerPart
from vtoken_torch.vllm_plugin.record import MASS_ATTRIBUTE, StepRecord

if TYPE_CHECKING:
    from vtoken_torch.vllm_plugin.lazy.holes import HoleKeeper
    from vtoken_torch.vllm_plugin.worker_side import WorkerSide

__all__ = ["MassCollector"]


class MassCollector(WorkerPart):
    """Watches the model's attention layers from the first step on in which a request asks for mass.

    Attributes:
        rows: the work of the step, once its first layer has run.
    """

    def __init__(self, side: "WorkerSide", holes: "HoleKeeper | None" = None, *, replaces: bool = True) -> None:
        """``holes``: knows the dead slots, in lazy mode. ``replaces``: as in ``WatchedAttention.of``."""
        self._side, self._holes, self._replaces = side, holes, replaces
        self._attention: WatchedAttention | None = None
        self._windows: dict[ReqId, int] = {}
        self._asks: list[Ask] = []
        self.rows: list[MassRows] = []
        self._num_layers = 0
        self.acts = self.reports = False

    def before_moves(self, record: StepRecord) -> None:
        """Notes who asks."""
        self._windows = record.mass
        self.acts = bool(record.mass)

    def before_forward(self, req_ids: Sequence[ReqId]) -> None:
        """Finds the asking requests' rows in the batch."""
        windows, self._num_layers = self._windows, 0
        found = enumerate(req_ids) if windows else ()
        self._asks = [Ask(req_id, row, windows[req_id]) for row, req_id in found if req_id in windows]
        self.reports = bool(self._asks)
        if self._asks and self._attention is None:
            layers = self._side.layers
            self._attention = WatchedAttention.of(layers, self._replaces)
            self._attention.watch(layers, self)

    @property
    def num_asks(self) -> int:
        """Rows of the step that ask for mass."""
        return len(self._asks)

    def add(self, layer: Any, query: torch.Tensor, cache: torch.Tensor, metadata: Any) -> None:
        """A layer has run. ``query``: ``[num_tokens, num_query_heads, head_size]``; its keys are in ``cache``."""
        if not self._asks or self._attention is None:
            return
        if not self._num_layers:
            dead = None if self._holes is None else self._holes.dead
            self.rows = self._attention.rows(self._asks, metadata, cache, dead)
        impl = layer.impl
        heads, reader = Heads(impl.scale, impl.logits_soft_cap, impl.sinks), self._attention.reader(layer, cache)
        for rows in self.rows:
            rows.add(query, cache, reader, heads)
        self._num_layers += 1

    def after_forward(self, req_ids: Sequence[ReqId], result: Any) -> None:
        """Reports, by request, float32 arrays ``[rows, slots]``, up to the cursor; holes too, in lazy mode."""
        whole = torch.cat([rows.masses.flatten() for rows in self.rows]) / self._num_layers
        parts = tensor_model_parallel_all_reduce(whole).cpu().split([rows.masses.numel() for rows in self.rows])
        report = {}
        for rows, part in zip(self.rows, parts, strict=True):
            split = rows.split(part.view_as(rows.masses))
            report.update({req_id: masses.numpy() for req_id, masses in split.items()})
        setattr(result, MASS_ATTRIBUTE, report)
        self._asks, self.rows, self.reports = [], [], False
