"""The worker's side of attention mass: gathered while vLLM's layers run, reported with the step's result."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from vllm.distributed import tensor_model_parallel_all_reduce

from vtoken.types import ReqId
from vtoken_torch.vllm_plugin.layout import probe_packing
from vtoken_torch.vllm_plugin.mass.attention_cpu import watch
from vtoken_torch.vllm_plugin.mass.queries import Ask, Heads, KeyReader, MassRows, rows_of
from vtoken_torch.vllm_plugin.parts import WorkerPart
from vtoken_torch.vllm_plugin.record import MASS_ATTRIBUTE, StepRecord

if TYPE_CHECKING:
    from vtoken_torch.vllm_plugin.worker_side import WorkerSide

__all__ = ["MassCollector"]


class MassCollector(WorkerPart):
    """Watches the model's attention layers from the first step on in which a request asks for mass."""

    def __init__(self, side: "WorkerSide") -> None:
        self._side = side
        self._is_watching = False
        self._readers: dict[tuple[Any, ...], KeyReader] = {}
        self._windows: dict[ReqId, int] = {}
        self._asks: list[Ask] = []
        self._rows: list[MassRows] = []
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
        if self._asks and not self._is_watching:
            watch(self._side.layers, self)
            self._is_watching = True

    def add(self, layer: Any, query: torch.Tensor, cache: torch.Tensor, metadata: Any) -> None:
        """A layer has run. ``query``: ``[num_tokens, num_query_heads, head_size]``; its keys are in ``cache``."""
        if not self._asks:
            return
        if not self._num_layers:
            self._rows = rows_of(self._asks, metadata, cache.shape[2])
        impl = layer.impl
        heads, reader = Heads(impl.scale, impl.logits_soft_cap, impl.sinks), self._reader(layer.isa, cache)
        for rows in self._rows:
            rows.add(query, cache, reader, heads)
        self._num_layers += 1

    def after_forward(self, req_ids: Sequence[ReqId], result: Any) -> None:
        """Reports, by request, float32 arrays ``[rows, live tokens]`` in packed order."""
        whole = torch.cat([rows.masses.flatten() for rows in self._rows]) / self._num_layers
        parts = tensor_model_parallel_all_reduce(whole).split([rows.masses.numel() for rows in self._rows])
        report = {}
        for rows, part in zip(self._rows, parts, strict=True):
            split = rows.split(part.view_as(rows.masses))
            report.update({req_id: masses.numpy() for req_id, masses in split.items()})
        setattr(result, MASS_ATTRIBUTE, report)
        self._asks, self._rows, self.reports = [], [], False

    def _reader(self, isa: str, cache: torch.Tensor) -> KeyReader:
        _, _, block_size, width = cache.shape
        key = isa, cache.dtype, block_size, width // 2
        if key not in self._readers:
            self._readers[key] = KeyReader(probe_packing(*key)[:, : width // 2])
        return self._readers[key]
