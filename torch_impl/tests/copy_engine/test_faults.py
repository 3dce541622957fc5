"""The real call sequence on the fake device, and what becomes of it under one fault at a time.

``pytest -rP -k fault_is_caught`` prints how often each is, by lag.
"""

from itertools import chain, combinations

import pytest

from vtoken.errors import InvariantError
from vtoken_torch.copy_engine import CUDACopyEngine
from vtoken_torch.copy_engine.fake_device import FakeDevice
from vtoken_torch.copy_engine.rehearsal import Rehearsal

LAGS = (0, 1, 3, 8)
NUM_STEPS = 20
NUM_RUNS = 20  # for each fault and lag
STREAMS = ("compute", "copy", "prefill")
ORDERS = tuple(chain.from_iterable(combinations(STREAMS, count) for count in range(3)))  # streams that run ahead


# -- faults: a mutant each, of the engine or of the loop that drives it ------------------------------------------------


class ComputeDoesNotWait(CUDACopyEngine):
    def wait(self):
        pass


class ComputeWaitsForAnEarlierLaunch(CUDACopyEngine):
    earlier = newest = None

    def launch(self, src, dst, after=None):
        self.earlier, self.newest = self.newest, super().launch(src, dst, after)
        return self.newest

    def wait(self):
        if self.earlier is not None:
            self._device.current_stream().wait_event(self.earlier.copy_done)


class ComputeWaitsBeforeTheRecord(CUDACopyEngine):
    """An event that was never recorded holds nobody up."""

    def wait(self):
        self._device.current_stream().wait_event(self._device.make_event())


class CopiesDoNotWaitForTheForward(CUDACopyEngine):
    def launch(self, src, dst, after=None):
        return super().launch(src, dst, self._device.make_event())


class FencesIgnoreTheCopies(CUDACopyEngine):
    def fence(self):
        self._last_copy, copy = None, self._last_copy
        number = super().fence()
        self._last_copy = copy
        return number


class FencesAskTheirFirstEventOnly(CUDACopyEngine):
    def passed(self):
        while self._fences and self._fences[0][1][0].query():
            self._num_passed, _ = self._fences.popleft()
        return self._num_passed


class OneFenceOpensAll(CUDACopyEngine):
    def passed(self):
        if any(all(event.query() for event in events) for _, events in self._fences):
            self._num_passed = self._fences[-1][0]
            self._fences.clear()
        return self._num_passed


class CopyDoneIsRecordedOnCompute(CUDACopyEngine):
    def launch(self, src, dst, after=None):
        ticket = super().launch(src, dst, after)
        ticket.copy_done.record(self._device.current_stream())
        return ticket


class PlanIsUploadedOnCompute(CUDACopyEngine):
    def launch(self, src, dst, after=None):
        device = self._device
        upload = device.upload
        device.upload = lambda plan, stream: upload(plan, device.compute)
        ticket = super().launch(src, dst, after)
        del device.upload
        return ticket


class PlanBuffersAreNotAwaited(CUDACopyEngine):
    def _rested_plan(self, num_moves, stream):
        self._plans[0] = self._plans[0][0], None
        return super()._rested_plan(num_moves, stream)


class HalfTheMovesOnAThirdStream(CUDACopyEngine):
    """Two launches, two streams, the events of one."""

    def launch(self, src, dst, after=None):
        half, own = len(src) // 2, self._own
        if half:
            self._own = self.__dict__.setdefault("_third", self._device.make_stream("third"))
            super().launch(src[:half], dst[:half], after)
            self._own = own
        return super().launch(src[half:], dst[half:], after)


class BlocksComeBackAtOnce(Rehearsal):
    def give_up(self, block_ids):
        if block_ids:
            self.pool.free(block_ids, None)


class BlocksOfAnEndedRequestComeBackAtOnce(Rehearsal):
    is_ending = False

    def end_request(self):
        self.is_ending = True
        super().end_request()
        self.is_ending = False

    def give_up(self, block_ids):
        if block_ids and self.is_ending:
            self.pool.free(block_ids, None)
        else:
            super().give_up(block_ids)


class BlocksFreedInThePassAreFree(Rehearsal):
    """The next plan of the pass, and the next step, have what one plan has given up."""

    num_blocks = 11

    def evict(self, table):
        plan = super().evict(table)
        if plan is not None:
            self.pool.free(plan.freed_block_ids, None)
            self.pool.begin_pass()
        return plan

    def give_up(self, block_ids):
        pass


class FenceIsTakenBeforeTheLaunch(Rehearsal):
    def reclaim(self, forward_done):
        number, fence = self.engine.fence(), self.engine.fence
        self.engine.fence = lambda: number
        super().reclaim(forward_done)
        self.engine.fence = fence


class RecyclesBeforeItWaits(Rehearsal):
    """The step's tokens are written, some over slots of moves under way; then compute waits."""

    def decode(self):
        self.write("append", self.take_slots(), self.device.compute, 0.5)
        self.engine.wait()
        self.attend()


FAULTS = {
    fault.__name__: fault
    for fault in (
        *(ComputeDoesNotWait, ComputeWaitsForAnEarlierLaunch, ComputeWaitsBeforeTheRecord),
        *(CopiesDoNotWaitForTheForward, FencesIgnoreTheCopies, FencesAskTheirFirstEventOnly, OneFenceOpensAll),
        *(CopyDoneIsRecordedOnCompute, PlanIsUploadedOnCompute, PlanBuffersAreNotAwaited),
        *(HalfTheMovesOnAThirdStream, BlocksComeBackAtOnce, BlocksOfAnEndedRequestComeBackAtOnce),
        *(BlocksFreedInThePassAreFree, FenceIsTakenBeforeTheLaunch, RecyclesBeforeItWaits),
    )
}
OF_ORDER = (  # of streams, and so seen in data when the wrong stream runs ahead
    "ComputeDoesNotWait",
    "ComputeWaitsForAnEarlierLaunch",
    "CopiesDoNotWaitForTheForward",
    "CopyDoneIsRecordedOnCompute",
    "PlanIsUploadedOnCompute",
    "BlocksComeBackAtOnce",
    "RecyclesBeforeItWaits",
)


def rehearse(fault, device, seed, **settings):
    is_engine = issubclass(fault, CUDACopyEngine)
    loop = Rehearsal(device, seed, fault, **settings) if is_engine else fault(device, seed, **settings)
    return loop.run(NUM_STEPS)


def is_caught(fault, lag, seed):
    num_plans = 1 if fault is PlanBuffersAreNotAwaited else 4
    try:
        rehearse(fault, FakeDevice(lag), seed, num_plans=num_plans)
    except InvariantError:
        return True
    return False


# -- without a fault ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lag", LAGS)
def test_the_protocol_has_no_race(lag):
    loops = [rehearse(CUDACopyEngine, FakeDevice(lag), seed) for seed in range(200)]
    assert sum(loop.num_wrong_reads for loop in loops) == 0
    assert min(loop.engine.num_moves for loop in loops) > 0
    for count in ("num_recycled", "num_shared", "num_ended"):
        assert sum(getattr(loop, count) for loop in loops) > 100


@pytest.mark.parametrize("ahead", ORDERS, ids="+".join)
def test_no_order_of_streams_shows_attention_another_token(ahead):
    for seed in range(4):
        for lag in (0, 2, None):
            device = FakeDevice(lag, eager=ahead, checks_races=False)
            assert rehearse(CUDACopyEngine, device, seed).num_wrong_reads == 0


def test_moves_on_the_compute_stream_need_no_fence():
    for seed in range(20):
        loop = rehearse(CUDACopyEngine, FakeDevice(1), seed, own_stream=False)
        assert loop.pool.num_in_flight == 0
        assert loop.num_wrong_reads == 0


def test_a_single_plan_buffer_makes_the_host_wait_and_no_race():
    loop = rehearse(CUDACopyEngine, FakeDevice(8), 0, num_plans=1)
    assert loop.engine.num_host_waits > 0
    assert loop.num_wrong_reads == 0


# -- with one ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FAULTS)
def test_each_fault_is_caught(name):
    caught = [sum(is_caught(FAULTS[name], lag, seed) for seed in range(NUM_RUNS)) for lag in LAGS]
    print(f"caught in {caught} of {NUM_RUNS} runs each, by lag {LAGS}")
    assert max(caught) >= NUM_RUNS // 5


@pytest.mark.parametrize("name", OF_ORDER)
def test_a_fault_of_order_changes_what_attention_reads_in_some_order(name):
    num_wrong = {}
    for ahead in ORDERS:
        device = [FakeDevice(2, eager=ahead, checks_races=False) for _ in range(6)]
        num_wrong[ahead] = sum(rehearse(FAULTS[name], each, seed).num_wrong_reads for seed, each in enumerate(device))
    assert max(num_wrong.values()) > 0, num_wrong
