"""Reads vLLM's cache after every step, through the worker's own block table. Engine and worker share this process."""

from collections.abc import Sequence
from typing import Any

import torch

from vtoken.errors import InvariantError
from vtoken.types import ReqId
from vtoken_conformance.fingerprint import fingerprint
from vtoken_conformance.vllm_run import Pass, Seen
from vtoken_torch.vllm_plugin.parts import SchedulerPart, WorkerPart
from vtoken_torch.vllm_plugin.record import StepRecord

__all__ = ["Recorder"]


class Recorder(SchedulerPart, WorkerPart):
    """A part of both sides of one engine.

    Attributes:
        passes: what was recorded so far.
        num_moves, num_recycles, num_shared: proof of what happened; as in ``VllmRun``.
    """

    def __init__(self, core: Any) -> None:
        """``core``: vLLM's ``EngineCore``."""
        self.passes: list[Pass] = []
        self.num_moves = self.num_recycles = self.num_shared = 0
        self._scheduler = core.scheduler
        self._runner = core.model_executor.driver_worker.worker.model_runner
        self._block_row = _block_row_v2 if hasattr(self._runner, "req_states") else _block_row_v1
        self._computed: dict[ReqId, int] = {}
        self._finished: list[ReqId] = []
        self._started: dict[ReqId, tuple[int, int]] = {}
        self._scheduler.parts.append(self)
        self._runner.vtoken.parts.append(self)

    def request_left(self, req_id: ReqId, is_finished: bool) -> None:
        """Notes its end."""
        if not is_finished:
            raise InvariantError(f"INV-6: request {req_id!r} was preempted in a pool that holds all requests at once")
        del self._computed[req_id]
        self._finished.append(req_id)

    def pass_closed(self, output: Any, record: StepRecord) -> None:
        """Counts, and notes who began."""
        self.num_moves += len(record.src_slots)
        self.num_recycles += len(self._scheduler.vtoken.ledger.recycled(output.num_scheduled_tokens))
        self.num_shared += sum(block.ref_cnt > 1 for block in self._scheduler.kv_cache_manager.block_pool.blocks)
        for req_id in output.num_scheduled_tokens:
            if req_id not in self._computed:
                self._computed[req_id] = 0
                prompt_len = self._scheduler.requests[req_id].num_prompt_tokens
                self._started[req_id] = self._scheduler.vtoken.trace_key(req_id), prompt_len

    def after_forward(self, req_ids: Sequence[ReqId], result: Any) -> None:
        """Reads what the step's requests retain."""
        kv, seen = {}, {}
        runner = self._runner
        num_dead = runner.rows.dead_on_host.tolist() if runner.vtoken.any_evicted else [0] * len(req_ids)
        for req_id, dead in zip(req_ids, num_dead, strict=bool(req_ids)):
            kv[req_id], seen[req_id] = self._read(req_id, dead)
        self.passes.append(Pass(tuple(self._finished), self._started, kv, seen))
        self._finished, self._started = [], {}

    def _read(self, req_id: ReqId, num_dead: int) -> tuple[bytes, Seen]:
        """The bytes of the tokens that are new, and everything that the kernels would read of this request.

        ``num_dead``: tokens that the step's lengths left out.
        """
        ledger, side = self._scheduler.vtoken.ledger, self._runner.vtoken
        size, num_computed = ledger.spec.block_size, self._scheduler.requests[req_id].num_computed_tokens
        block_ids = self._block_row(self._runner, req_id)
        columns = ledger.columns(req_id) or range(num_computed - num_dead)
        slots = [block_ids[index // size] * size + index % size for index in columns]
        tokens = dict(zip(ledger.packed_positions(req_id), _token_bytes(side.mover.read(slots)), strict=True))
        first, self._computed[req_id] = self._computed[req_id], num_computed
        new = b"".join(tokens[position] for position in range(first, num_computed))
        num_blocks = len(ledger.manager.req_to_blocks[req_id])
        return new, Seen(tuple(tokens), num_blocks, fingerprint(tokens))


def _block_row_v1(runner: Any, req_id: ReqId) -> list[int]:
    """The request's row of the worker's block table; what lies behind its blocks means nothing."""
    batch = runner.input_batch
    row: list[int] = batch.block_table[0].get_numpy_array()[batch.req_id_to_index[req_id]].tolist()
    return row


def _block_row_v2(runner: Any, req_id: ReqId) -> list[int]:
    row: list[int] = runner.block_tables.block_tables[0].gpu[runner.req_states.req_id_to_index[req_id]].tolist()
    return row


def _token_bytes(tokens: torch.Tensor) -> list[bytes]:
    """Each token's raw bytes in canonical order. ``tokens``: ``[n, layers, 2, heads, dim]``."""
    rows = tokens.reshape(len(tokens), -1).contiguous().view(torch.uint8).numpy()
    return [row.tobytes() for row in rows]
