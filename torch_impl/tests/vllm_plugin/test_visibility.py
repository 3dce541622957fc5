"""INV-3 online, without an engine: what counts as the wrong order, and which blocks may not be given away."""

from types import SimpleNamespace

import pytest

from vtoken.invariants import Violation


class Worker:
    """Two requests, ``a`` and ``b``; ``a`` has a move in each step."""

    def __init__(self):
        from vtoken_torch.vllm_plugin.verify.visibility import StepOrder

        self.num_moved = 0
        self.order = StepOrder(lambda: self.num_moved)

    def step(self, number, copies=1, late=0, has_forward=True):
        """Carries a record out; what was found, as (request, what)."""
        from vtoken.types import Move
        from vtoken_torch.vllm_plugin.record import StepRecord
        from vtoken_torch.vllm_plugin.verify.changes import Changes, PassChanges

        rest = {"is_start": False, "dead": [], "first_new": 9, "new_slots": [], "num_cached": 0, "num_left_out": 0}
        made = {"a": Changes(moves=[Move(3, 40, 8)], **rest), "b": Changes(moves=[], **rest)}
        record = StepRecord(number, src_slots=[40], dst_slots=[8], verify=PassChanges(made))
        found = [*self.order.begins(record)]
        self.num_moved += copies
        found += self.order.copied(record)
        self.order.forward(["a", "b"])
        self.num_moved += late
        if has_forward:
            self.order.forward(())
        assert all(finding.number == 3 for finding in found)
        return [(finding.req_id, finding.what) for finding in found]


def test_the_right_order_is_left_alone():
    worker = Worker()
    assert [worker.step(number) for number in (7, 8, 9)] == [[], [], []]


def test_each_wrong_order_is_named_for_the_requests_that_it_concerns():
    worker = Worker()
    worker.step(1)
    assert worker.step(3) == [(req_id, "number of the record") for req_id in "ab"]
    assert worker.step(3) == [(req_id, "number of the record") for req_id in "ab"]
    assert worker.step(4, copies=0, late=1) == [("a", "copies of step 4 before its first write")]
    assert worker.step(5, has_forward=False) == [("a", "tokens copied after step 4 began its forward")]
    assert worker.step(6) == [(req_id, "forward of step 5 when the next one begins") for req_id in "ab"]
    assert worker.step(7) == []


class Pool:
    """``PoolNow`` of four blocks."""

    def __init__(self, free=(), hashes=(), **holders):
        self.holders = {req_id: SimpleNamespace(block_ids=blocks) for req_id, blocks in holders.items()}
        self._free, self._hashes = free, dict(hashes)

    def free_block_ids(self):
        return self._free

    def block_hash(self, block_id):
        return self._hashes.get(block_id)

    def is_aside(self, block_id):
        return False


@pytest.fixture
def busy():
    """Copies of pass 5 read block 1, which ``a`` gave up, and write block 2, which it holds."""
    from vtoken_torch.vllm_plugin.record import StepRecord
    from vtoken_torch.vllm_plugin.verify.visibility import BusyBlocks

    blocks = BusyBlocks(block_size=32)
    blocks.add(StepRecord(5, src_slots=[40], dst_slots=[70]), {"a": {1, 2}}, Pool(a=[2], hashes={1: "h"}))
    return blocks


@pytest.mark.parametrize(
    ("now", "got"),
    [
        (Pool(a=[2], free=[1]), "free"),
        (Pool(a=[2], b=[1]), r"given to \['b'\]"),
        (Pool(a=[2], b=[1], hashes={1: "other"}), r"given to \['b'\]"),
        (Pool(b=[2]), r"given to \['b'\]"),
    ],
)
def test_a_block_that_copies_use_is_kept_until_they_are_done(busy, now, got):
    with pytest.raises(Violation, match=f"^INV-3: block [12], which copies of pass 5 use: .* got {got}$"):
        busy.check(now)
    busy.done(4)
    with pytest.raises(Violation):
        busy.check(now)
    busy.done(5)
    busy.check(now)


def test_who_held_it_or_finds_it_by_its_hash_may_hold_it(busy):
    busy.check(Pool(a=[1, 2]))
    busy.check(Pool(a=[2], b=[1], hashes={1: "h"}))
    busy.check(Pool(free=[3]))
