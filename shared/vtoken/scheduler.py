"""The scheduler's side of one engine: drives any executor through eviction, reclamation and allocation.

One pass over the running requests, in this order:

    begin_pass(...)            deaths that are due, then plans: freed blocks serve the same pass
    write(req_id, ...)         the step's tokens: over a doomed one, or at the cursor
    end_step(req_id, ...)      the source chooses the next victims; they die at once or are doomed
    end_pass()                 the executor's step is over; fences pass
"""

from contextlib import suppress
from typing import Protocol

from vtoken.config import VTokenConfig
from vtoken.errors import PoolExhausted, SpecError
from vtoken.eviction import Counters, Evictor, KVBooks, Running
from vtoken.executor import Buffer
from vtoken.reclamation.admission import Admission, admission, count_pool
from vtoken.types import ReqId, cdiv
from vtoken.victims import VictimSource

__all__ = ["Counters", "KVScheduler", "WritableBooks"]


class WritableBooks(KVBooks, Protocol):
    """What ``KVScheduler`` calls of an ``Executor``."""

    def append(self, req_id: ReqId, num_tokens: int, kv: Buffer) -> None: ...
    def recycle(self, req_id: ReqId, kv: Buffer) -> None: ...


class KVScheduler(Evictor):
    """An ``Evictor`` that also admits requests and writes their tokens."""

    def __init__(self, config: VTokenConfig, executor: WritableBooks, victims: VictimSource) -> None:
        super().__init__(config, executor, victims)
        self.executor = executor

    def can_admit(self, num_tokens_now: int, worst_case_tokens: int, chunk_tokens: int = 0) -> Admission:
        """Whether a request may start that writes ``num_tokens_now`` now and has ``worst_case_tokens`` live at most."""
        tables = [self.executor.table_view(req_id) for req_id in self._running]
        counters = count_pool(tables, self.executor.pool_view(), self.config)
        size = self.executor.spec.block_size
        return admission(counters, cdiv(num_tokens_now, size), cdiv(worst_case_tokens + chunk_tokens, size))

    def write(self, req_id: ReqId, num_tokens: int, kv: Buffer) -> None:
        """Writes the step's tokens, after plans for room if need be; raises PoolExhausted with nothing written."""
        running = self._running[req_id]
        if num_tokens != running.num_writing:
            raise SpecError(f"request {req_id!r} writes {num_tokens} tokens, begin_pass was told {running.num_writing}")
        if running.recycles:
            self.executor.recycle(req_id, kv)
            self._count_recycle(running)
            return
        self._kill_due(req_id, running)
        try:
            self.executor.append(req_id, num_tokens, kv)
        except PoolExhausted:
            for other in self._running:
                if self.reclaim(other, force=True):
                    with suppress(PoolExhausted):
                        self.executor.append(req_id, num_tokens, kv)
                        return
            raise

    def _count_recycle(self, running: Running) -> None:
        """The step's token went over the next doomed one."""
        running.recycles = False
        running.deaths.popleft()
        self.counters.num_recycled_tokens += 1
        self.counters.num_evicted_tokens += 1
