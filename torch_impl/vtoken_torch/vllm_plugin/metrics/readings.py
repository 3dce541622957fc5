"""Where each number comes from. Whatever is asked in every pass is O(1); live tokens are O(requests)."""

from typing import TYPE_CHECKING, Any, NamedTuple

from vtoken.types import ReqId, cdiv
from vtoken_torch.vllm_plugin.metrics.clocks import time_planners
from vtoken_torch.vllm_plugin.metrics.names import Values
from vtoken_torch.vllm_plugin.parts import SchedulerPart
from vtoken_torch.vllm_plugin.record import StepRecord

if TYPE_CHECKING:
    from vtoken_torch.vllm_plugin.scheduler import VTokenScheduler
    from vtoken_torch.vllm_plugin.verify.checks import OnlineChecks

__all__ = ["Blocks", "Readings", "Usage"]


class Blocks(NamedTuple):
    """Blocks of the pool; ``total = free + held + in_flight`` (INV-6), the null block apart."""

    total: int
    free: int
    held: int
    in_flight: int


class Usage(NamedTuple):
    """How well the held blocks are used.

    Attributes:
        live_tokens: summed over requests; a token that several share counts for each.
        fragmentation: share of the held blocks' slots that hold no live token, the paper's F.
        reclaimable: held blocks beyond what the live tokens need.
    """

    live_tokens: int
    fragmentation: float
    reclaimable: int


class Readings(SchedulerPart):
    """The numbers of one engine's scheduler side. As a part it counts what nobody else does."""

    def __init__(self, scheduler: "VTokenScheduler", checks: "OnlineChecks | None" = None) -> None:
        (group,) = scheduler.kv_cache_config.kv_cache_groups
        self._scheduler = scheduler
        self._checks = checks
        self._driver = scheduler.vtoken
        self._manager = scheduler.vtoken.ledger.manager
        page_bytes = group.kv_cache_spec.page_size_bytes * scheduler.vllm_config.parallel_config.tensor_parallel_size
        self.token_bytes = page_bytes * len(group.layer_names) // group.kv_cache_spec.block_size
        self.planning = time_planners(self._driver.manager)
        self.num_moved_tokens = 0
        self.num_evicting_preemptions = 0

    def pass_closed(self, output: Any, record: StepRecord) -> None:
        self.num_moved_tokens += len(record.src_slots)

    def request_left(self, req_id: ReqId, is_finished: bool) -> None:
        if not is_finished and self._driver.ledger.num_dead(req_id):
            self.num_evicting_preemptions += 1

    @property
    def is_idle(self) -> bool:
        """Whether nothing runs, so that the next pass may be long in coming."""
        return not self._scheduler.running

    @property
    def queue(self) -> tuple[int, int]:
        """Running and waiting requests."""
        running, waiting = self._scheduler.get_request_counts()
        return running, waiting

    @property
    def is_fenced(self) -> bool:
        """Whether copies have a stream of their own, so that steps end before them."""
        return self._driver.ledger.pool.is_fenced

    @property
    def copied_through(self) -> int:
        """In that regime: number of the last pass whose copies are known to be done."""
        return self._driver.ledger.num_copied_passes

    @property
    def num_evicted_tokens(self) -> int:
        """Tokens evicted so far."""
        return self._driver.counters.num_evicted_tokens

    @property
    def num_recycled_tokens(self) -> int:
        """Of those, the ones that were written over."""
        return self._driver.counters.num_recycled_tokens

    def blocks(self) -> Blocks:
        """Where the pool's blocks are. O(1)."""
        pool = self._driver.ledger.pool
        total, free, in_flight = pool.num_blocks - 1, pool.num_free, pool.num_in_flight
        return Blocks(total, free, total - free - in_flight, in_flight)

    def usage(self, num_held: int) -> Usage:
        """How well ``num_held`` blocks are used. O(requests)."""
        size, count = self._manager.block_size, self._driver.ledger.count
        num_dead, parked = self._driver.ledger.num_dead, self._manager.parked
        num_live = num_listed = num_spare = 0
        for req_id, blocks in self._manager.req_to_blocks.items():
            live = count(req_id) - num_dead(req_id)
            listed = len(blocks) + len(parked.get(req_id, ()))
            num_live += live
            num_listed += listed
            num_spare += max(0, listed - cdiv(live, size))
        if not num_held:
            return Usage(num_live, 0.0, num_spare)
        used = self._driver.ledger.num_used_slots(num_live, num_listed - num_held) / (num_held * size)
        return Usage(num_live, min(max(0.0, 1 - used), 1.0), num_spare)

    def values(self) -> Values:
        """All metrics by name, that of verification if it is on. O(requests)."""
        counters, driver, blocks = self._driver.counters, self._driver, self.blocks()
        usage = self.usage(blocks.held)
        return {
            "pool_blocks": blocks.total,
            "held_blocks": blocks.held,
            "free_blocks": blocks.free,
            "in_flight_blocks": blocks.in_flight,
            "reclaimable_blocks": usage.reclaimable,
            "fragmentation": usage.fragmentation,
            "live_tokens": usage.live_tokens,
            "evicted_tokens": counters.num_evicted_tokens,
            "recycled_slots": counters.num_recycled_tokens,
            "moved_tokens": self.num_moved_tokens,
            "moved_bytes": self.num_moved_tokens * self.token_bytes,
            "freed_blocks": counters.num_freed_blocks,
            "copied_blocks": driver.ledger.pool.num_copied,
            "unhashed_blocks": driver.ledger.pool.num_unhashed,
            "plans": counters.num_plans,
            "plans_refused": dict(driver.manager.refused),
            "postponed_kills": driver.num_postponed,
            "evicting_preemptions": self.num_evicting_preemptions,
            "policy_seconds": driver.requests.choosing.seconds,
            "planner_seconds": self.planning.seconds,
            **({} if self._checks is None else {"verification_failures": self._checks.num_findings}),
        }
