"""vLLM's model runner V1 with lengths and slots that count live tokens."""

from typing import Any

import numpy as np
import torch
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.worker.block_table import MultiGroupBlockTable
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from vtoken_torch.vllm_plugin.runner import EvictingRunner, ReportingRunner

__all__ = ["EvictingRunnerV1"]


class EvictingRunnerV1(EvictingRunner, GPUModelRunner):
    """Overrides of vLLM's runner. All writes are in place: no address changes."""

    @property
    def hooked(self) -> list[Any]:
        """Objects with overrides of ours."""
        return [self, self.input_batch.block_table]

    def _update_states(self, scheduler_output: SchedulerOutput) -> Any:
        """The record first, then vLLM's own part."""
        record = self.vtoken.begin_step(scheduler_output)
        for req_id, block_ids in record.block_ids.items():
            self.requests[req_id].block_ids[0][:] = block_ids
            row = self.input_batch.req_id_to_index.get(req_id)
            if row is not None:
                self.input_batch.block_table.add_row((block_ids,), row)
        self.show_face()
        return super()._update_states(scheduler_output)

    def packed(self, positions: torch.Tensor) -> torch.Tensor:
        """Indices among the live tokens: ``positions`` ``[num_tokens]`` less the dead tokens of each one's request."""
        if not self.vtoken.any_evicted:
            return positions
        batch = self.input_batch
        counts = batch.num_computed_tokens_cpu[: batch.num_reqs]
        self.rows.stage(self.vtoken, batch.req_ids, counts, self.query_start_loc.np, len(positions))
        return self.rows.packed(positions, self.req_indices)

    def _count_live(self) -> None:
        self.rows.shorten(self.seq_lens, self.optimistic_seq_lens_cpu)

    def _aim_at_recycled(self) -> None:
        self.vtoken.num_recycled_tokens += self.rows.num_recycled
        self.rows.aim(self.input_batch.block_table[0].slot_mapping.gpu)


class PackedRunnerV1(EvictingRunnerV1):
    """The face for steps of requests with dead tokens."""

    def _prepare_inputs(self, scheduler_output: SchedulerOutput, num_scheduled_tokens: np.ndarray) -> Any:
        """Afterwards lengths and slots count live tokens."""
        table = self.input_batch.block_table  # vLLM may have made another one
        if type(table) is not _PackedTable:
            table.__class__, table.vtoken_runner = _PackedTable, self
        result = super()._prepare_inputs(scheduler_output, num_scheduled_tokens)
        if self.vtoken.any_evicted:
            self._count_live()
            if self.rows.num_recycled:
                self._aim_at_recycled()
        return result


class ReportingRunnerV1(PackedRunnerV1, ReportingRunner):
    """The face for steps in which a part acts."""

    def _prepare_inputs(self, scheduler_output: SchedulerOutput, num_scheduled_tokens: np.ndarray) -> Any:
        """Afterwards the parts know the batch."""
        result = super()._prepare_inputs(scheduler_output, num_scheduled_tokens)
        self.vtoken.begin_forward(self.input_batch.req_ids)
        return result

    def sample_tokens(self, *args: Any, **kwargs: Any) -> Any:
        """vLLM's, with the parts' reports on what goes back."""
        if not self.vtoken.reports:
            return super().sample_tokens(*args, **kwargs)
        req_ids = list(self.input_batch.req_ids)
        self.vtoken.begin_sampling()
        result = super().sample_tokens(*args, **kwargs)
        self.vtoken.end_step(req_ids, result)
        return result


EvictingRunnerV1.faces = EvictingRunnerV1, PackedRunnerV1, ReportingRunnerV1


class _PackedTable(MultiGroupBlockTable):
    """vLLM's block table, which computes a step's slots once all counts of the step are known."""

    vtoken_runner: EvictingRunnerV1

    def compute_slot_mapping(self, num_reqs: int, query_start_loc: torch.Tensor, positions: torch.Tensor) -> None:
        """Slots of packed indices."""
        super().compute_slot_mapping(num_reqs, query_start_loc, self.vtoken_runner.packed(positions))
