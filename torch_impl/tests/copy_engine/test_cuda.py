import pytest
import torch

from vtoken.errors import InvariantError
from vtoken_torch.copy_engine import CUDACopyEngine, IndexCopyEngine, StreamedCopyEngine, cuda, make_copy_engine
from vtoken_torch.copy_engine.device import Plan
from vtoken_torch.copy_engine.fake_device import FakeDevice
from vtoken_torch.copy_engine.race_clocks import Race
from vtoken_torch.kv_cache import KVCache


def no_copies(src, dst, count):
    pass


def names(device, stream="copy"):
    return [span.what for span in device.spans if span.stream == stream]


def test_a_launch_uploads_its_plan_and_moves_on_the_copy_stream_in_one_go():
    device, seen = FakeDevice(), []
    engine = CUDACopyEngine(device, lambda src, dst, count: seen.append((src.tolist(), dst.tolist(), count.tolist())))
    engine.launch([3, 9, 4], [7, 5, 6])
    assert names(device) == ["upload plan", "move 3 tokens"]
    assert names(device, "compute") == []
    device.finish()
    assert seen == [([3, 9, 4], [7, 5, 6], [3])]
    assert (engine.num_launches, engine.num_moves) == (1, 3)


def test_moves_on_the_compute_stream_are_in_its_order():
    device = FakeDevice()
    engine = CUDACopyEngine(device, no_copies, own_stream=False)
    device.enqueue(device.compute, "forward", writes=[3])
    engine.launch([3], [7])
    engine.wait()
    device.enqueue(device.compute, "next forward", reads=[7])
    assert names(device, "compute") == ["forward", "upload plan", "move 1 tokens", "next forward"]


def test_a_ticket_is_done_when_copies_and_forward_are():
    device = FakeDevice(lag=2)
    ticket = CUDACopyEngine(device, no_copies).launch([1], [2])
    assert [ticket.is_done() for _ in range(6)] == [False, False, False, False, True, True]


def test_copies_begin_behind_the_event_given_not_behind_later_work():
    device = FakeDevice()
    engine = CUDACopyEngine(device, no_copies)
    device.enqueue(device.compute, "forward", writes=[3], duration=5)
    forward_done = engine.forward_done()
    device.enqueue(device.compute, "sample", duration=10)
    engine.launch([3], [7], forward_done)
    (upload, move) = [span for span in device.spans if span.stream == "copy"]
    assert upload.start == 5
    assert move.end < 15
    engine.launch([8], [9])  # after all work
    assert device.spans[-2].start >= 15


def test_fences_pass_in_order_and_say_which():
    device = FakeDevice(lag=None)
    engine = CUDACopyEngine(device, no_copies)
    assert engine.passed() == 0
    device.enqueue(device.compute, "forward", duration=5)
    engine.launch([3], [7])
    first = engine.fence()
    device.enqueue(device.compute, "forward", duration=5)
    second = engine.fence()
    assert (first, second, engine.passed()) == (1, 2, 0)
    device.now = 8
    assert engine.passed() == first
    device.now = 10
    assert engine.passed() == second


def test_a_wait_holds_the_compute_stream_once_for_each_launch():
    device = FakeDevice()
    engine = CUDACopyEngine(device, no_copies)
    engine.wait()  # nothing to wait for
    engine.launch([3], [7])
    engine.wait()
    engine.wait()
    assert device.compute.num_queued == 1


def test_a_plan_longer_than_its_buffers_gets_longer_ones():
    device, seen = FakeDevice(), []
    engine = CUDACopyEngine(device, lambda src, dst, count: seen.append((src.tolist(), dst.tolist())), num_plans=1)
    for size in (1, 257, 1000, 0, 2):
        engine.launch(range(size), range(5000, 5000 + size))
    device.finish()
    assert seen == [(list(range(n)), list(range(5000, 5000 + n))) for n in (1, 257, 1000, 0, 2)]


@pytest.mark.parametrize("capacity", [1, 4, 256])
@pytest.mark.parametrize("count", [0, 1, 3, 4])
def test_both_lists_of_a_plan_begin_at_16_bytes(capacity, count):
    if count > capacity:
        return
    plan = Plan(*(torch.zeros(Plan.num_words(capacity), dtype=torch.int32) for _ in range(2)))
    assert plan.capacity >= capacity
    plan.fill(range(count), range(10, 10 + count))
    plan.upload()
    src, dst, length = plan.lists()
    assert (src.tolist(), dst.tolist(), length.tolist()) == (list(range(count)), list(range(10, 10 + count)), [count])
    assert (dst.storage_offset() * 4) % 16 == (src.storage_offset() * 4) % 16 == 0


@pytest.mark.parametrize(
    ("src", "dst", "message"),
    [
        ([1, 2], [3, 1], r"slots \[1\] are read and written in one launch"),
        ([1, 2], [3, 3], "2 sources, 2 destinations, 1 of them different"),
        ([1], [3, 4], "1 sources, 2 destinations, 2 of them different"),
    ],
)
def test_overlap_within_a_launch_is_refused_before_anything_is_enqueued(src, dst, message):
    device = FakeDevice()
    with pytest.raises(InvariantError, match=f"INV-5: {message}"):
        CUDACopyEngine(device, no_copies).launch(src, dst)
    assert device.spans == []


def test_one_source_may_have_two_destinations():
    CUDACopyEngine(FakeDevice(), no_copies).launch([1, 1], [2, 3])


def test_a_copy_into_a_block_that_another_plan_of_the_launch_empties_is_a_race_too(monkeypatch):
    """Copy-on-write into what was freed in the same pass, if the host did not look."""
    monkeypatch.setattr(cuda, "check_disjoint", lambda src, dst: None)
    with pytest.raises(Race, match="move 3 tokens on copy reads and writes slot 9, in no order"):
        CUDACopyEngine(FakeDevice(), no_copies).launch([9, 10, 40], [4, 5, 9])


def test_moves_of_a_cache_on_the_copy_stream_are_seen_by_whoever_waits(make_spec):
    spec = make_spec()
    cache = KVCache(spec, torch.device("cpu"))
    device, indexed = FakeDevice(eager={"compute"}), IndexCopyEngine(cache)
    engine = StreamedCopyEngine(indexed, CUDACopyEngine(device, indexed.move_planned))
    token = bytes(range(256)) * (spec.token_bytes // 256)
    engine.write([5], token)
    engine.move([5], [9])
    slot = torch.tensor([9])
    assert bytes(indexed.read(slot)) != token  # nobody has waited, nothing has moved
    assert bytes(engine.read(slot)) == token


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("regime", ["ordered", "fenced"])
def test_moves_of_a_cache_on_a_cuda_stream(make_spec, regime):
    spec, device = make_spec(num_blocks=300, regime=regime), torch.device("cuda")
    engine = make_copy_engine(KVCache(spec, device))
    expected = torch.randint(0, 255, (spec.num_slots, spec.token_bytes), dtype=torch.uint8)
    engine.write(range(spec.num_slots), expected.numpy().tobytes())
    for seed in range(20):
        order = torch.randperm(spec.num_slots, generator=torch.Generator().manual_seed(seed))
        src, dst = order[:400], order[400:800]
        engine.move(src.tolist(), dst.tolist())
        expected[dst] = expected[src]
    fence = engine.moves.fence()
    assert bytes(engine.read(torch.arange(spec.num_slots, device=device))) == expected.numpy().tobytes()
    torch.cuda.synchronize()
    assert engine.moves.passed() == fence
