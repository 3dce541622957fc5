import pytest

from vtoken_torch.copy_engine.fake_device import Durations, FakeDevice, Span
from vtoken_torch.copy_engine.race_clocks import Race


def two_streams(device):
    return device.compute, device.make_stream()


def test_two_reads_need_no_order():
    device = FakeDevice()
    for stream in two_streams(device):
        device.enqueue(stream, "read", reads=[1])


@pytest.mark.parametrize(
    ("first", "second", "message"),
    [
        ({"writes": [1]}, {"reads": [1]}, "second on copy reads slot 1 and does not wait for 'first' on compute"),
        ({"reads": [1]}, {"writes": [1]}, "second on copy overwrites slot 1, which 'first' on compute may still use"),
        ({"writes": [1]}, {"writes": [1]}, "second on copy overwrites slot 1, which 'first' on compute may still use"),
    ],
)
def test_a_conflict_without_order_is_a_race_and_an_event_orders_it(first, second, message):
    for is_ordered in (True, False):
        device = FakeDevice()
        compute, copy = two_streams(device)
        device.enqueue(compute, "first", **first)
        event = device.make_event()
        if is_ordered:
            event.record(compute)
        copy.wait_event(event)  # never recorded, it holds nobody up
        if is_ordered:
            device.enqueue(copy, "second", **second)
        else:
            with pytest.raises(Race, match=message):
                device.enqueue(copy, "second", **second)


def test_an_event_stands_where_it_was_recorded_last():
    device = FakeDevice()
    compute, copy = two_streams(device)
    event = device.make_event()
    event.record(compute)
    device.enqueue(compute, "write", writes=[1])
    copy.wait_event(event)
    with pytest.raises(Race):
        device.enqueue(copy, "read", reads=[1])


def test_every_read_since_the_last_write_counts():
    device = FakeDevice()
    compute, copy = two_streams(device)
    third = device.make_stream("third")
    device.enqueue(compute, "early", reads=[1])
    device.enqueue(copy, "late", reads=[1])
    event = device.make_event()
    event.record(copy)
    third.wait_event(event)
    with pytest.raises(Race, match="'early' on compute may still use"):
        device.enqueue(third, "write", writes=[1])


@pytest.mark.parametrize("lag", [0, 1, 3])
def test_a_query_says_no_as_often_as_the_lag_and_its_yes_orders_the_host(lag):
    device = FakeDevice(lag)
    compute, copy = two_streams(device)
    device.enqueue(compute, "write", writes=[1])
    event = device.make_event()
    assert event.query()  # never recorded: nothing to wait for
    event.record(compute)
    for _ in range(lag):
        assert not event.query()
    if lag:
        with pytest.raises(Race):
            device.enqueue(copy, "read", reads=[1])
    assert event.query()
    device.enqueue(copy, "read again", reads=[1])


def test_work_happens_in_the_order_of_streams_and_waits_only():
    for ahead, expected in ((("copy",), "cab"), (("compute",), "abc"), ((), "abc")):
        device, done = FakeDevice(eager=ahead), []
        compute, copy = two_streams(device)
        device.enqueue(compute, "a", run=lambda done=done: done.append("a"))
        device.enqueue(compute, "b", run=lambda done=done: done.append("b"))
        device.enqueue(copy, "c", run=lambda done=done: done.append("c"))
        device.finish()
        assert "".join(done) == expected


def test_whoever_runs_ahead_takes_along_what_it_waits_for_and_no_more():
    device, done = FakeDevice(eager={"copy"}), []
    compute, copy = two_streams(device)
    device.enqueue(compute, "a", run=lambda: done.append("a"))
    event = device.make_event()
    event.record(compute)
    device.enqueue(compute, "b", run=lambda: done.append("b"))
    copy.wait_event(event)
    device.enqueue(copy, "c", run=lambda: done.append("c"))
    assert done == ["a", "c"]


def test_what_the_host_knows_to_be_done_has_happened():
    device, done = FakeDevice(), []
    device.enqueue(device.compute, "a", run=lambda: done.append("a"))
    event = device.make_event()
    event.record(device.compute)
    assert done == []
    event.synchronize()
    assert done == ["a"]


def test_simulated_time_follows_streams_waits_and_the_host():
    device = FakeDevice(lag=None, durations=Durations(upload=1, move=2, per_token=0.5))
    compute, copy = two_streams(device)
    device.work("schedule", 2)
    device.enqueue(compute, "forward", duration=5)
    event = device.make_event()
    event.record(compute)
    copy.wait_event(event)
    device.enqueue(copy, "move", duration=1)
    assert device.spans == [
        Span("host", 0, 2, "schedule"),
        Span("compute", 2, 7, "forward"),
        Span("copy", 7, 8, "move"),
    ]
    assert not event.query()
    device.work("other", 6)
    assert event.query()
