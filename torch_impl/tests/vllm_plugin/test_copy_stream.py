"""Where copies run. Stream ``own`` is the engine that drives CUDA's streams, here on a fake device: copies happen late,
one by one and in an order of their own, and are said to be done still later."""

import random
from collections import Counter, defaultdict

import pytest

SCATTERED = {"policy": "random", "kv_budget": 60, "recent": 8, "interval": 8, "when": "always"}
BUSY = {**SCATTERED, "kv_budget": 120, "interval": 4, "recycle": False, "copy_stream": "own"}  # moves in most steps


class LaggingDevice:
    """Copies happen when compute waits for them; each of a launch's two events is known ``lag`` questions later."""

    lag = 1

    def __init__(self, device, mover):
        from vtoken_torch.copy_engine.fake_device import FakeDevice
        from vtoken_torch.vllm_plugin.copy_streams import OwnStream

        self.mover = mover
        self.order = random.Random(3)
        self.num_late = self.num_marks = 0
        self.pending = []
        self.own = OwnStream(FakeDevice(self.lag, eager={"compute"}), self)

    def launch(self, src_slots, dst_slots):
        self.pending.append(self.own.launch(src_slots, dst_slots))
        return _Launch(self, self.pending[-1])

    def wait(self):
        self.own.wait()
        self.grow_older()

    def forward_done(self):
        self.num_marks += 1
        self.own.forward_done()

    def grow_older(self):
        self.pending = [ticket for ticket in self.pending if not ticket.is_done()]

    def move_planned(self, src, dst, count):
        moves = list(zip(src.tolist(), dst.tolist(), strict=True))
        assert len(moves) == count.item()
        self.order.shuffle(moves)
        for move in moves:
            self.mover.move(*([slot] for slot in move))


class _Launch:
    def __init__(self, device, ticket):
        self.device, self.ticket = device, ticket

    def is_done(self):
        is_done = self.ticket.is_done()
        self.device.num_late += not is_done
        return is_done


class NobodyWaits(LaggingDevice):
    """The mutant in which compute goes on without its copies."""

    def wait(self):
        self.grow_older()


@pytest.fixture
def lagging(monkeypatch):
    """Puts such a device in, and says how late it is."""
    from vtoken_torch.vllm_plugin.copy_streams import OWN_STREAMS

    def put_in(lag, kind=LaggingDevice):
        monkeypatch.setattr(kind, "lag", lag)
        monkeypatch.setitem(OWN_STREAMS, "cpu", kind)

    return put_in


class Watch:
    """Notes which blocks copies read or write that nobody has reported done. None of them is free, none gets a holder
    beside those it had; and all blocks but the null one are free, held, or in flight."""

    def __init__(self, engine):
        self.engine, self.scheduler, self.pool = engine, engine.scheduler, engine.pool
        self.ledger = self.scheduler.vtoken.ledger
        self.met = Counter()
        self.busy = {}  # block -> the pass of its copies, and who may hold it
        self._launch, self._done, self._schedule = self.ledger.launch, self.ledger.copies_done, self.scheduler.schedule
        self.ledger.launch, self.ledger.copies_done = self.launch, self.done
        self.scheduler.schedule = self.schedule

    def launch(self, plan):
        holders = self.holders()
        self._launch(plan)
        slots = [slot for move in plan.moves for slot in (move.src_slot, move.dst_slot)]
        for block_id in {slot // 32 for slot in slots} | set(plan.freed_block_ids):
            self.busy[block_id] = self.ledger.pool.pass_number, holders[block_id] | {plan.req_id}

    def done(self, number):
        self._done(number)
        self.busy = {block_id: why for block_id, why in self.busy.items() if why[0] > number}

    def schedule(self, *args, **kwargs):
        pool = self.ledger.pool
        assert pool.num_free + len(self.holders()) + pool.num_in_flight == self.engine.num_free_at_start, "INV-6"
        self.met["in flight"] += pool.num_in_flight > 0
        output = self._schedule(*args, **kwargs)
        holders = self.holders()
        for block_id, (number, may_hold) in self.busy.items():
            assert self.pool.blocks[block_id].ref_cnt, f"block {block_id} is free, pass {number} still copies"
            assert holders[block_id] <= may_hold, f"block {block_id} was given out, pass {number} still copies"
        self.met["waits"] += bool(self.scheduler.running) and not output.num_scheduled_tokens
        return output

    def holders(self):
        found = defaultdict(set)
        for req_id, blocks in self.ledger.manager.req_to_blocks.items():
            for block in blocks:
                found[block.block_id].add(req_id)
        return found


def _drain(engine, tokens):
    """One more request, so that the last reports come."""
    engine.submit(tokens(5), 2 * LaggingDevice.lag + 6, vtoken_off=True)
    engine.run()


@pytest.mark.parametrize("lag", [0, 1, 4])
@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
def test_late_copies_change_no_token_and_no_block_comes_early(world, reference, tokens, lagging, lag, is_async):
    lagging(lag)
    with world(BUSY, num_blocks=19, async_scheduling=is_async) as engine:
        watch = Watch(engine)
        for length in (100, 200, 64, 150, 90):
            engine.submit(tokens(length), 70)
        engine.run(abort_at={12: 0, 31: 2})
        _drain(engine, tokens)
        engine.assert_exact(reference)
        engine.assert_nothing_left()
        assert engine.counts["moves"] > 50
        assert engine.counts["aborts"] == 2
        device = engine.runner.vtoken.copies._stream
        assert (device.num_late > 0) == (lag > 0)
        assert device.num_marks > device.own.engine.num_launches > 20  # copies may run beside sampling
        assert (watch.met["in flight"] > 0) == (lag > 0 or is_async)


def test_late_copies_out_of_shared_blocks_under_verification(world, reference, tokens, lagging):
    lagging(3)
    prefix, settings = tokens(100), {**SCATTERED, "copy_stream": "own", "verify": True}
    with world(settings, num_blocks=33, enable_prefix_caching=True) as engine:
        for count in (30, 3, 61):
            engine.submit(prefix + tokens(count), 30)
        engine.run()
        for count in (12, 70):
            engine.submit(prefix + tokens(count), 30)
        engine.run(abort_at={9: 3})
        _drain(engine, tokens)
        engine.assert_exact(reference)
        engine.assert_nothing_left()
        assert sum(outcome.num_cached for outcome in engine.outcomes.values()) > 0
        assert engine.scheduler.vtoken.ledger.pool.num_copied > 0
        assert not any(getattr(part, "findings", None) for part in engine.scheduler.parts)
        assert engine.runner.vtoken.copies._stream.num_marks == 0  # fingerprints are read after the forward


def test_late_copies_of_the_naive_baseline(world, reference, tokens, lagging):
    lagging(3)
    with world({**BUSY, "variant": "naive"}, num_blocks=33) as engine:
        for length in (100, 200, 150):
            engine.submit(tokens(length), 40)
        engine.run(abort_at={12: 0})
        _drain(engine, tokens)
        engine.assert_exact(reference)
        engine.assert_nothing_left()
        assert engine.counts["moves"] > 50


GROWING = {"policy": "streaming_llm", "kv_budget": 120, "interval": 16, "when": "always", "copy_stream": "own"}


@pytest.mark.parametrize("is_mutant", [False, True], ids=["as it is", "mutant"])
def test_when_all_that_is_free_is_in_flight_the_scheduler_waits(
    world, reference, tokens, lagging, monkeypatch, is_mutant
):
    from vllm.v1.core.sched.scheduler import Scheduler

    from vtoken_torch.vllm_plugin.scheduler import VTokenScheduler

    if is_mutant:
        asked = Scheduler._request_blocks_can_be_freed
        monkeypatch.setattr(VTokenScheduler, "_request_blocks_can_be_freed", asked)
    lagging(25)
    with world(GROWING, num_blocks=17) as engine:
        watch = Watch(engine)
        for _ in range(2):
            engine.submit(tokens(250), 40)
        engine.run()
        _drain(engine, tokens)
        engine.assert_exact(reference)
        engine.assert_nothing_left()
        assert (engine.counts["preemptions"] > 0) == is_mutant
        assert is_mutant or watch.met["waits"] > 0


def _free_early(monkeypatch):
    from vtoken_torch.vllm_plugin.pool import VllmPool

    monkeypatch.setattr(VllmPool, "fence", lambda self, blocks, number: self._pool.free_blocks(reversed(blocks)))


def _free_early_at_the_end(monkeypatch):
    from vtoken_torch.vllm_plugin.ledger import Ledger

    monkeypatch.setattr(Ledger, "_hold_back", lambda self, req_id, blocks: False)


@pytest.mark.parametrize("mutate", [_free_early, _free_early_at_the_end])
def test_a_block_that_is_free_too_early_is_noticed(world, tokens, lagging, monkeypatch, mutate):
    lagging(4)
    mutate(monkeypatch)
    with world(BUSY, num_blocks=19) as engine:
        Watch(engine)
        for length in (100, 200, 64, 150, 90):
            engine.submit(tokens(length), 70)
        with pytest.raises(AssertionError, match="still copies"):
            engine.run(abort_at={12: 0, 31: 2})


@pytest.mark.parametrize("mutate", [_free_early, _free_early_at_the_end])
def test_a_block_that_is_free_too_early_is_noticed_online(world, tokens, lagging, monkeypatch, mutate):
    """INV-3: whoever got the block ends, the block is set aside."""
    lagging(4)
    mutate(monkeypatch)
    with world({**BUSY, "verify": True}, num_blocks=19) as engine:
        for length in (100, 200, 64, 150, 90):
            engine.submit(tokens(length), 70)
        engine.run(abort_at={12: 0, 31: 2})
        checks = next(part for part in engine.scheduler.parts if type(part).__name__ == "OnlineChecks")
        early = [finding for finding in checks.findings if finding.number == 3]
        assert early
        assert {finding.block_id for finding in early} <= checks.books.aside


def test_a_step_that_does_not_wait_is_noticed_online(world, tokens, lagging):
    lagging(2, NobodyWaits)
    with world({**SCATTERED, "copy_stream": "own", "verify": True}) as engine:
        engine.submit(tokens(100), 40)
        engine.run()
        checks = next(part for part in engine.scheduler.parts if type(part).__name__ == "OnlineChecks")
        assert 3 in {finding.number for finding in checks.findings}


def test_a_step_that_does_not_wait_is_noticed(world, reference, tokens, lagging):
    lagging(2, NobodyWaits)
    with world({**SCATTERED, "copy_stream": "own"}) as engine:
        for length in (100, 60):
            engine.submit(tokens(length), 40)
        engine.run()
        with pytest.raises(AssertionError, match=r"other tokens|logprobs differ"):
            engine.assert_exact(reference)


def test_sync_waits_for_the_device_after_each_steps_moves(world, reference, tokens, monkeypatch):
    import torch

    waits = []
    with world({**SCATTERED, "copy_stream": "sync"}) as engine:
        monkeypatch.setattr(torch.accelerator, "synchronize", lambda *args: waits.append(args))
        engine.submit(tokens(100), 40)
        engine.run()
        assert len(waits) > 0
        assert engine.counts["moves"] > 0
        engine.assert_exact(reference)


def test_own_on_a_device_without_streams_is_refused(world):
    with pytest.raises(
        ValueError, match="copy_stream='own' on device cpu, which has no streams to copy on: use 'compute' or 'sync'"
    ):
        world({**SCATTERED, "copy_stream": "own"})
