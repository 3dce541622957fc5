"""What hangs on the two sides of the plugin: attention mass, verification, metrics, the timeline.

Each is a part of its own and knows no other; ``assembly`` says which run. The sides call them at fixed points, so that
none of them costs anything while it is off.
"""

from collections.abc import Collection, Sequence
from typing import Any

from vtoken.types import ReqId
from vtoken_torch.vllm_plugin.record import StepRecord

__all__ = ["SchedulerPart", "WorkerPart"]


class SchedulerPart:
    """Told what the scheduler's side did. Override what you need; the rest does nothing. Raising ends the engine."""

    def request_came(self, req_id: ReqId) -> None:
        """A request was submitted."""

    def pass_opened(self) -> None:
        """A scheduling pass has begun: deaths, plans and recycles are decided, vLLM has not allocated yet."""

    def pass_closed(self, output: Any, record: StepRecord) -> None:
        """A scheduling pass is over: vLLM's ``SchedulerOutput``, and the record that goes to the workers with it."""

    def result_came(self, output: Any, result: Any) -> None:
        """A step's ``ModelRunnerOutput`` is back, before vLLM reads it. ``output``: the pass that it answers."""

    def request_left(self, req_id: ReqId, is_finished: bool) -> None:
        """A request's table and blocks are about to go: it ended, or it was preempted and will be rebuilt."""

    def close(self) -> None:
        """The engine shuts down."""


class WorkerPart:
    """Told what a worker did in a step, in stream order. Override what you need; the rest does nothing.

    Attributes:
        acts: whether ``before_forward`` or ``after_forward`` has anything to do in the step whose moves are done.
        reports: whether ``after_forward`` has anything to do in the step whose inputs are ready.
        reads_kv: whether ``after_forward`` may read the cache, so that copies must wait for it.
    """

    acts = True
    reports = True
    reads_kv = True

    def requests_left(self, req_ids: Collection[ReqId]) -> None:
        """The step begins. These are gone, or begin from nothing; its record may speak of them anew."""

    def before_moves(self, record: StepRecord) -> None:
        """The step begins; no copy and no write of it has happened yet."""

    def after_moves(self, record: StepRecord) -> None:
        """The record's copies are done; vLLM has not yet written, zeroed or copied anything."""

    def before_forward(self, req_ids: Sequence[ReqId]) -> None:
        """The step's inputs are ready. ``req_ids``: the batch, in the row order of vLLM's attention metadata."""

    def after_forward(self, req_ids: Sequence[ReqId], result: Any) -> None:
        """The step's KV is written. ``req_ids``: the batch, in row order; ``result``: the ``ModelRunnerOutput``.

        What is set on ``result`` as an attribute reaches the scheduler's side, in every process layout.
        """
