"""Who waits, who runs, and how room is made for them in one pool."""

from collections import deque
from collections.abc import Sequence

from vtoken.reclamation.admission import Admission, Answer, admission, count_pool
from vtoken.serving.pool import RunnerPool, SlotScheduler
from vtoken.serving.prefixes import Parent, find_parent
from vtoken.serving.requests import FinishReason, Request
from vtoken.types import cdiv

__all__ = ["Batch"]


class Batch:
    """First come, first served. A chunk of a prompt is computed whole or waits; the newest is preempted first."""

    def __init__(
        self, scheduler: SlotScheduler, pool: RunnerPool, chunk_tokens: int, max_num_seqs: int, share_prefixes: bool
    ) -> None:
        self.scheduler, self.pool, self.config = scheduler, pool, scheduler.config
        self.chunk_tokens, self.max_num_seqs, self.share_prefixes = chunk_tokens, max_num_seqs, share_prefixes
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []  # oldest first

    # -- admission (M-1, M-2) ----------------------------------------------------------------------------------------

    def admit(self) -> None:
        """Starts requests from the head of the queue as long as they fit."""
        while self.waiting and len(self.running) < self.max_num_seqs:
            head = self.waiting[0]
            parent = self._parent_of(head)
            if parent is not None and parent.num_tokens < parent.num_soon:
                return  # the rest of the prefix is being computed
            if not self._fits(head, parent):
                self._make_room_for(head)
                parent = self._parent_of(head)  # pressure may have taken what it would share
                if not self._fits(head, parent):
                    return
            self.waiting.popleft()
            self._start(head, parent)

    def admission(self, request: Request, num_shared: int = 0) -> Admission:
        """Whether it may start beside what running prompts still ask for: its prompt, or its worst case if less.

        O(running): what could be reclaimed is not counted but reclaimed (``_make_room_for``).
        """
        size = self.pool.spec.block_size
        promised = sum(
            max(0, cdiv(self._num_asked(other), size) - len(self.pool.tables[other.req_id].block_ids))
            for other in self.running
            if other.computed < other.prefill_to
        )
        needed = cdiv(max(0, self._num_asked(request) - num_shared), size) + promised
        counters = count_pool((), self.pool.pool, self.config)
        return admission(counters, needed, cdiv(sum(self._worst_case(request)), size))

    def _fits(self, request: Request, parent: Parent | None) -> bool:
        return self.admission(request, parent.num_tokens if parent else 0).answer is Answer.ADMIT

    def _make_room_for(self, head: Request) -> None:
        """What is given without preemption: plans that wait for a reason, else (under ``pressure``) evictions."""
        for request in self.running:
            self.scheduler.reclaim(request.req_id, force=True)
        if not self.pool.pool.num_in_flight and not self._fits(head, None):
            self.scheduler.relieve(queue_blocked=True)

    def _num_asked(self, request: Request) -> int:
        return min(request.prefill_to, sum(self._worst_case(request)))

    def _worst_case(self, request: Request) -> tuple[int, int]:
        """Most tokens that it keeps live, and the chunk on top. Other variants are promised nothing back."""
        total, config = request.max_computed, self.config
        if config.variant != "vtoken":
            return total, 0
        chunk = min(self.chunk_tokens, len(request.prompt))
        kept = max(config.budget_tokens(total), config.kept_tokens(total, len(request.prompt)))
        return min(total - chunk, kept + config.interval), chunk

    def _parent_of(self, request: Request) -> Parent | None:
        return find_parent(request, self.running, self.pool.tables) if self.share_prefixes else None

    def _start(self, request: Request, parent: Parent | None) -> None:
        about = (request.index, len(request.prompt), request.max_computed)
        if parent is not None and parent.num_tokens:
            self.scheduler.admit_child(request.req_id, parent.request.req_id, parent.num_tokens, *about)
            request.computed = parent.num_tokens
        else:
            self.scheduler.admit(request.req_id, *about)
        self.running.append(request)

    # -- one pass ----------------------------------------------------------------------------------------------------

    def schedule(self) -> list[Request]:
        """Every decoding request, and whole chunks, oldest first, of ``chunk_tokens`` together."""
        left = self.chunk_tokens
        scheduled = []
        for request in self.running:
            if request.computed < request.prefill_to:
                count = request.num_next(self.chunk_tokens)
                left = left - count if count <= left else -1  # no younger one overtakes
                if left < 0:
                    continue
            scheduled.append(request)
        return scheduled

    def make_room(self, scheduled: list[Request]) -> list[Request]:
        """Those that get their slots in this pass: all, unless fences are waited for or someone is preempted."""
        while self._num_short(scheduled) > 0:
            if self._reclaim(scheduled):
                continue
            if self.pool.pool.num_in_flight:
                needing = [request for request in scheduled if self.scheduler.num_new_blocks(request.req_id)]
                scheduled = [request for request in scheduled if request is not needing[-1]]
            elif not self.scheduler.relieve(queue_blocked=True):
                newest = self.running[-1]
                self._preempt(newest)
                scheduled = [request for request in scheduled if request is not newest]
        return scheduled

    def end(self, request: Request, reason: FinishReason) -> None:
        """Ends a request, wherever it is."""
        request.finish_reason = reason
        if request in self.running:
            self.running.remove(request)
            request.num_evicted = self.pool.tables[request.req_id].num_evicted_tokens
            self.scheduler.finish(request.req_id)
        elif request in self.waiting:
            self.waiting.remove(request)
            self.scheduler.victims.finish(request.index)

    def _num_short(self, scheduled: Sequence[Request]) -> int:
        needed = sum(self.scheduler.num_new_blocks(request.req_id) for request in scheduled)
        return needed - self.pool.pool.num_free

    def _reclaim(self, scheduled: Sequence[Request]) -> bool:
        """Plans, one request after another, until all fit; whether blocks came back at once."""
        before = self.pool.pool.num_free
        for request in self.running:
            if self.scheduler.reclaim(request.req_id, force=True) and self._num_short(scheduled) <= 0:
                break
        return self.pool.pool.num_free > before

    def _preempt(self, request: Request) -> None:
        """Back to the head of the queue; alone and no further than last time, it ends: the pool cannot hold it."""
        if len(self.running) == 1 and request.computed <= request.preempted_at:
            self.end(request, "exhausted")
            return
        self.scheduler.preempt(request.req_id)
        self.running.remove(request)
        request.restart()
        self.waiting.appendleft(request)
