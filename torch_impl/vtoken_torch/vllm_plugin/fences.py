"""Regime ``fenced`` between the two sides: workers say which copies are done, and blocks that waited for them are free.

A block that a plan gave up comes back when the copies of its pass are reported done, and the forward that reported
them, with all before it, has finished: results come in the order of the passes.
"""

from collections.abc import Sequence
from typing import Any

from vtoken.types import ReqId
from vtoken_torch.vllm_plugin.copy_streams import Copies
from vtoken_torch.vllm_plugin.ledger import Ledger
from vtoken_torch.vllm_plugin.parts import SchedulerPart, WorkerPart
from vtoken_torch.vllm_plugin.record import ATTRIBUTE, StepRecord

__all__ = ["CopyReport", "FenceKeeper", "copied_through"]

_COPIED = "vtoken_copied"


def copied_through(output: Any, result: Any) -> int:
    """The last pass up to which all copies are done, as far as this result says. ``output``: the pass it answers."""
    record: StepRecord = getattr(output, ATTRIBUTE)
    done: int = getattr(result, _COPIED)
    return min(done, record.number)


class CopyReport(WorkerPart):
    """The worker's end."""

    reads_kv = False

    def __init__(self, copies: Copies) -> None:
        self._copies = copies

    def after_forward(self, req_ids: Sequence[ReqId], result: Any) -> None:
        setattr(result, _COPIED, self._copies.done_through)


class FenceKeeper(SchedulerPart):
    """The scheduler's end."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger

    def result_came(self, output: Any, result: Any) -> None:
        self._ledger.copies_done(copied_through(output, result))
