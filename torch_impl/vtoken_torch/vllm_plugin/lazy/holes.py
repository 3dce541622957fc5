"""The worker's side of lazy mode: which rows of a step have dead slots, and their attention."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from vllm import _custom_ops as ops
from vllm import envs

from vtoken.types import ReqId, cdiv
from vtoken_torch.vllm_plugin.layout import probe_packing
from vtoken_torch.vllm_plugin.lazy.attention_cpu import skip_dead
from vtoken_torch.vllm_plugin.lazy.live_attention import LiveChunk, LiveDecode, LiveRows
from vtoken_torch.vllm_plugin.lazy.pieces import Packing, Scratch, Visible
from vtoken_torch.vllm_plugin.lazy.told import ToldSlots
from vtoken_torch.vllm_plugin.parts import WorkerPart
from vtoken_torch.vllm_plugin.record import StepRecord

if TYPE_CHECKING:
    from vtoken_torch.vllm_plugin.worker_side import WorkerSide

__all__ = ["HoleKeeper", "LiveStep"]

_GROUP_SLOTS = 1 << 14  # of the decode rows that are read at once: memory stays bounded, whatever the batch


@dataclass(frozen=True, slots=True)
class LiveStep:
    """Attention of one step, in every layer.

    Attributes:
        rows: those with dead slots.
        others: vLLM's metadata for its kernel, in which those rows are as short as they can be; None: there are none
            but those.
    """

    rows: Sequence[LiveRows]
    others: Any


class HoleKeeper(WorkerPart):
    """Makes the model's attention layers skip dead slots, in steps of requests that have some."""

    def __init__(self, side: "WorkerSide") -> None:
        self._side = side
        self._told: ToldSlots | None = None  # once the cache is there
        self._is_in_place = False
        self._packings: dict[tuple[Any, ...], Packing] = {}
        self._scratch = Scratch()
        self._dead: dict[int, torch.Tensor] = {}
        self._step: LiveStep | None = None
        self.acts = self.reports = self.reads_kv = False

    @property
    def dead(self) -> Mapping[int, torch.Tensor]:
        """Dead slots in table order by row of the step's batch, where a row has some: int64, ascending."""
        return self._dead

    def requests_left(self, req_ids: Collection[ReqId]) -> None:
        if self._told is not None:
            self._told.forget(req_ids)

    def before_moves(self, record: StepRecord) -> None:
        """Takes the record's words in; the last step is over."""
        self._dead, self._step = {}, None
        if self._told is None:
            (group,) = self._side.runner.kv_cache_config.kv_cache_groups
            self._told = ToldSlots(group.kv_cache_spec.block_size)
        self._told.take(record)
        self.acts = bool(self._told)

    def before_forward(self, req_ids: Sequence[ReqId]) -> None:
        """Finds the rows with dead slots in the batch."""
        if not self._is_in_place:
            skip_dead(self._side.layers, self)
            self._is_in_place = True
        told = self._told
        if told:
            found = ((row, told.dead(req_id)) for row, req_id in enumerate(req_ids))
            self._dead = {row: dead for row, dead in found if dead is not None}

    def step(self, layer: Any, query: torch.Tensor, cache: torch.Tensor, metadata: Any) -> LiveStep | None:
        """The step's attention, made in its first layer; None where no row has a dead slot."""
        if self._dead and self._step is None:
            self._step = self._prepare(layer, query, cache, metadata)
        return self._step

    def _prepare(self, layer: Any, query: torch.Tensor, cache: torch.Tensor, metadata: Any) -> LiveStep:
        packing, num_kv_heads = self._packing(layer.isa, cache), cache.shape[1]
        starts, lengths = metadata.query_start_loc.tolist(), metadata.seq_lens.tolist()
        table = metadata.block_table.numpy()
        rows: list[LiveRows] = []
        group: list[tuple[Visible, int]] = []  # decode rows to read at once, each with its token
        num_slots = 0
        for row, dead in self._dead.items():
            block_ids = table[row, : cdiv(lengths[row], packing.block_size)]
            visible, num_queries = Visible(block_ids, lengths[row], dead.numpy()), starts[row + 1] - starts[row]
            if num_queries > 1:
                rows.append(LiveChunk(visible, starts[row], num_queries, packing, num_kv_heads, self._scratch))
                continue
            if group and num_slots + lengths[row] > _GROUP_SLOTS:
                rows.append(_decode(group, packing, num_kv_heads, self._scratch))
                group, num_slots = [], 0
            group.append((visible, starts[row]))
            num_slots += lengths[row]
        if group:
            rows.append(_decode(group, packing, num_kv_heads, self._scratch))
        return LiveStep(rows, self._others(layer, query, metadata))

    def _others(self, layer: Any, query: torch.Tensor, metadata: Any) -> Any:
        """Rows with dead slots see their own tokens alone: vLLM's kernel wants each row to be there."""
        if len(self._dead) == len(metadata.seq_lens):
            return None
        rows, impl = torch.tensor(list(self._dead)), layer.impl
        lengths = metadata.seq_lens.clone()
        lengths[rows] = metadata.query_start_loc.diff()[rows]
        plan = ops.cpu_attn_get_scheduler_metadata(
            num_reqs=len(lengths),
            num_heads=impl.num_heads,
            num_kv_heads=impl.num_kv_heads,
            head_dim=impl.head_size,
            seq_lens=lengths,
            dtype=query.dtype,
            query_start_loc=metadata.query_start_loc,
            causal=metadata.causal,
            sliding_window_size=-1,
            isa=layer.isa,
            enable_kv_split=envs.VLLM_CPU_ATTN_SPLIT_KV,
            kv_cache_dtype=impl.kv_cache_dtype,
        )
        return replace(metadata, seq_lens=lengths, scheduler_metadata=plan)

    def _packing(self, isa: str, cache: torch.Tensor) -> Packing:
        _, _, block_size, width = cache.shape
        key = isa, cache.dtype, block_size, width // 2
        if key not in self._packings:
            self._packings[key] = Packing(probe_packing(*key))
        return self._packings[key]


def _decode(group: Sequence[tuple[Visible, int]], packing: Packing, num_kv_heads: int, scratch: Scratch) -> LiveDecode:
    requests, tokens = zip(*group, strict=True)
    return LiveDecode(requests, torch.tensor(tokens), packing, num_kv_heads, scratch)
