"""The worker's half, for vLLM's model runner V1: carries the step's record out, and reads lengths as live lengths.

Positions stay logical (RoPE). Three things count live tokens instead: blocks, KV lengths, slots.
"""

from typing import Any

import numpy as np
import torch
from vllm.config import get_layers_from_vllm_config
from vllm.model_executor.layers.attention import Attention
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from vtoken.types import ReqId, SlotId
from vtoken_torch.vllm_plugin.compat import config_refusals, layer_refusals, raise_all
from vtoken_torch.vllm_plugin.kv_spec import EvictableSpec
from vtoken_torch.vllm_plugin.layout import TokenMover
from vtoken_torch.vllm_plugin.record import ATTRIBUTE, StepRecord

__all__ = ["EvictingRunnerV1", "evicting"]


class EvictingRunnerV1(GPUModelRunner):
    """Overrides of vLLM's runner. ``evicting`` puts it in front of the class of a runner that is there already."""

    vtoken_mover: TokenMover | None
    _num_evicted: dict[ReqId, int]
    _recycled: dict[ReqId, SlotId]

    def start_vtoken(self) -> None:
        """Takes the place of ``__init__``."""
        self.vtoken_mover = None
        self._num_evicted, self._recycled = {}, {}

    def get_kv_cache_spec(self) -> dict[str, Any]:
        """The model's specs under our type, so that blocks are counted by our manager; refuses what cannot work."""
        specs = super().get_kv_cache_spec()
        layers = get_layers_from_vllm_config(self.vllm_config, Attention)
        raise_all([*config_refusals(self.vllm_config), *layer_refusals(specs, layers)])
        return {name: EvictableSpec.wrap(spec) for name, spec in specs.items()}

    def _update_states(self, scheduler_output: SchedulerOutput) -> Any:
        """Moves first: vLLM's own part zeroes, copies and hands out blocks that this step's plans gave back."""
        record: StepRecord = getattr(scheduler_output, ATTRIBUTE)
        if record.src_slots:
            self._mover().move(record.src_slots, record.dst_slots)
        for req_id, block_ids in record.block_ids.items():
            self.requests[req_id].block_ids[0][:] = block_ids
            row = self.input_batch.req_id_to_index.get(req_id)
            if row is not None:
                self.input_batch.block_table.add_row((block_ids,), row)
        for req_id in (*scheduler_output.finished_req_ids, *scheduler_output.scheduled_cached_reqs.resumed_req_ids):
            self._num_evicted.pop(req_id, None)
        self._num_evicted.update(record.num_evicted)
        self._recycled = record.recycled
        return super()._update_states(scheduler_output)

    def _prepare_inputs(self, scheduler_output: SchedulerOutput, num_scheduled_tokens: np.ndarray) -> Any:
        """Afterwards lengths and slots count live tokens. In place: their addresses never change."""
        result = super()._prepare_inputs(scheduler_output, num_scheduled_tokens)
        if self._num_evicted:
            self._count_live(scheduler_output.total_num_scheduled_tokens)
        if self._recycled:
            self._aim_at_recycled()
        return result

    def _count_live(self, num_tokens: int) -> None:
        num_reqs = self.input_batch.num_reqs
        dead = torch.tensor([self._num_evicted.get(req_id, 0) for req_id in self.input_batch.req_ids[:num_reqs]])
        self.optimistic_seq_lens_cpu[:num_reqs] -= dead.to(self.optimistic_seq_lens_cpu.dtype)
        dead = dead.to(self.device, non_blocking=True)
        self.seq_lens[:num_reqs] -= dead.to(self.seq_lens.dtype)
        packed = self.positions[:num_tokens] - dead[self.req_indices.gpu[:num_tokens].long()]
        self.input_batch.block_table.compute_slot_mapping(num_reqs, self.query_start_loc.gpu[: num_reqs + 1], packed)

    def _aim_at_recycled(self) -> None:
        rows = [(self.input_batch.req_id_to_index[req_id], slot) for req_id, slot in self._recycled.items()]
        tokens = [int(self.query_start_loc.np[row]) for row, _ in rows]
        slot_mapping = self.input_batch.block_table[0].slot_mapping.gpu
        slot_mapping[torch.tensor(tokens, device=self.device)] = torch.tensor(
            [slot for _, slot in rows], dtype=slot_mapping.dtype, device=self.device
        )

    def _mover(self) -> TokenMover:
        if self.vtoken_mover is None:
            layers = self.compilation_config.static_forward_context
            names = self.kv_cache_config.kv_cache_groups[0].layer_names
            self.vtoken_mover = TokenMover.of_layers([layers[name] for name in names])
        return self.vtoken_mover


def evicting(runner: GPUModelRunner) -> None:
    """Makes a runner that vLLM built an evicting one (its CPU worker builds it in line, with no hook)."""
    owner = type(runner)
    runner.__class__ = type(f"VToken{owner.__name__}", (EvictingRunnerV1, owner), {})
    runner.start_vtoken()
