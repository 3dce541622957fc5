"""vLLM's model runner V2 with lengths and slots that count live tokens."""

import copy
from typing import Any

import torch
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.model_runner import GPUModelRunner

from vtoken_torch.vllm_plugin.runner import ReportingRunner

__all__ = ["EvictingRunnerV2"]


class EvictingRunnerV2(ReportingRunner, GPUModelRunner):
    """Overrides of vLLM's runner. Its own lengths stay logical, since sampling compares them with the prompt's.

    Attention gets a copy of the batch whose lengths lie in ``live_lens``, a buffer that never moves; a captured graph
    binds it, since capturing and running both pass ``with_live_lengths``.
    """

    live_lens: torch.Tensor  # int32 [max_num_reqs]
    _counted: Any  # the InputBatch whose dead tokens ``rows`` holds

    @classmethod
    def convert(cls, runner: Any) -> None:
        """Makes ``runner`` an evicting one."""
        super().convert(runner)
        runner.live_lens = torch.zeros_like(runner.input_buffers.seq_lens)
        runner._counted = None

    @property
    def hooked(self) -> list[Any]:
        """Objects with overrides of ours."""
        return [self, self.model_state]

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """vLLM's; the model state that it makes hands lengths to attention."""
        super().load_model(*args, **kwargs)
        self.model_state.__class__ = _counting_live(type(self.model_state), self)

    def update_requests(self, scheduler_output: SchedulerOutput) -> None:
        """The record first, then vLLM's own part."""
        record = self.vtoken.begin_step(scheduler_output)
        for req_id, block_ids in record.block_ids.items():
            index = self.req_states.req_id_to_index[req_id]
            self.block_tables.append_block_ids(index, (block_ids,), overwrite=True)
        super().update_requests(scheduler_output)

    def prepare_attn(self, input_batch: InputBatch) -> tuple[tuple[torch.Tensor, ...], torch.Tensor]:
        """Slots are computed from packed indices instead of positions."""
        self._counted = packed = None
        if self.vtoken.any_evicted:
            counts, starts = input_batch.num_computed_tokens_np, input_batch.query_start_loc_np
            self.rows.stage(self.vtoken, input_batch.req_ids, counts, starts, input_batch.num_tokens)
            self._counted, packed = input_batch, self._count_live(input_batch)
        block_tables, slot_mappings = super().prepare_attn(packed or input_batch)
        if packed is not None and self.rows.num_recycled:
            self._aim_at_recycled(slot_mappings)
        self.vtoken.begin_forward(input_batch.req_ids)
        return block_tables, slot_mappings

    def with_live_lengths(self, input_batch: InputBatch) -> InputBatch:
        """The batch as attention may see it. A dummy one, for warm-up or capture, has no dead tokens."""
        num_rows = input_batch.seq_lens.shape[0]
        batch = copy.copy(input_batch)
        batch.seq_lens = self.live_lens[:num_rows].copy_(input_batch.seq_lens)
        if self._counted is input_batch:
            batch.seq_lens[: input_batch.num_reqs].sub_(self.rows.dead)
            batch.seq_lens_cpu_upper_bound = input_batch.seq_lens_cpu_upper_bound.clone()
            lengths = batch.seq_lens_cpu_upper_bound.numpy()[: input_batch.num_reqs]
            lengths -= self.rows.dead_on_host
        return batch

    def sample_tokens(self, *args: Any, **kwargs: Any) -> Any:
        """vLLM's, with the parts' reports on what goes back."""
        state = self.execute_model_state
        req_ids = [] if state is None else state.input_batch.req_ids
        if self.vtoken.reports:
            self.vtoken.begin_sampling()
        result = super().sample_tokens(*args, **kwargs)
        if self.vtoken.reports and state is not None:
            self.vtoken.end_step(req_ids, result)
        return result

    def _count_live(self, input_batch: InputBatch) -> InputBatch:
        """The batch with packed indices where its positions were."""
        dead, num_tokens = self.rows.dead, input_batch.num_tokens
        if num_tokens > dead.shape[0]:
            query_lens = input_batch.query_start_loc[: dead.shape[0] + 1].diff()
            dead = dead.repeat_interleave(query_lens, output_size=num_tokens)
        batch = copy.copy(input_batch)
        batch.positions = input_batch.positions.clone()
        batch.positions[:num_tokens].sub_(dead)
        return batch

    def _aim_at_recycled(self, slot_mappings: torch.Tensor) -> None:
        self.vtoken.num_recycled_tokens += self.rows.num_recycled
        self.rows.aim(slot_mappings[0])


def _counting_live(owner: type, runner: EvictingRunnerV2) -> type:
    """A class of model states that hand live lengths to attention."""

    class CountingLive(owner):
        def prepare_attn(self, input_batch: InputBatch, *args: Any, **kwargs: Any) -> Any:
            return super().prepare_attn(runner.with_live_lengths(input_batch), *args, **kwargs)

    return CountingLive
