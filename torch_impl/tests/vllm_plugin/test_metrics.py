"""The numbers of a real engine, from its scheduler to Prometheus' text, and the memory between the two processes."""

import os
from pathlib import Path

import pytest

SETTINGS = {"policy": "random", "kv_budget": 60, "interval": 8, "when": "always"}


def shown(registry):
    from prometheus_client import generate_latest

    from vtoken_torch.vllm_plugin.stats import parse

    return parse(generate_latest(registry).decode())


@pytest.fixture
def exposed(monkeypatch):
    """What this process shows of the engines that it starts."""
    from vtoken_torch.vllm_plugin.metrics.channel import CHANNEL, ChannelReader
    from vtoken_torch.vllm_plugin.metrics.exposition import EngineCollector

    monkeypatch.setenv(CHANNEL, "")  # so that it is taken back
    channel = ChannelReader()
    yield lambda: shown(_registry_of(EngineCollector(channel)))
    os.close(channel._fd)


def _registry_of(collector):
    from prometheus_client import CollectorRegistry

    registry = CollectorRegistry()
    registry.register(collector)
    return registry


def publisher(engine):
    (part,) = (part for part in engine.scheduler.parts if isinstance(part, _publisher_class()))
    return part


def _publisher_class():
    from vtoken_torch.vllm_plugin.metrics.publisher import Publisher

    return Publisher


def watch_usage(engine):
    """Holds the sums against the tables, slot by slot, whenever a pass closes; returns the list of what they said."""
    from vtoken.types import cdiv
    from vtoken_torch.vllm_plugin.metrics.readings import Readings
    from vtoken_torch.vllm_plugin.parts import SchedulerPart

    (readings,) = (part for part in engine.scheduler.parts if isinstance(part, Readings))
    ledger, size, said = engine.scheduler.vtoken.ledger, 32, []

    class Watch(SchedulerPart):
        def pass_closed(self, output, record):
            tables = dict(ledger.tables.items())
            slots = {table.slot_at(index) for table in tables.values() for index in table.live_table_slots()}
            held = {block for table in tables.values() for block in table.block_ids}
            parked = {block.block_id for blocks in ledger.manager.parked.values() for block in blocks}
            blocks = readings.blocks()
            assert blocks.held == len(held | parked)
            usage = readings.usage(blocks.held)
            assert usage.live_tokens == sum(table.num_live_tokens for table in tables.values())
            lists = {
                name: len(table.block_ids) + len(ledger.manager.parked.get(name, ())) for name, table in tables.items()
            }
            assert usage.reclaimable == sum(lists[name] - cdiv(tables[name].num_live_tokens, size) for name in tables)
            if blocks.held:
                assert usage.fragmentation == pytest.approx(1 - len(slots) / (blocks.held * size))
            said.append((blocks, usage))

    engine.scheduler.parts.append(Watch())
    return said


def test_what_the_server_would_show_is_what_the_engine_counted(world, tokens, exposed):
    from vtoken_torch.vllm_plugin.metrics.names import METRICS

    assert exposed() == []
    with world(SETTINGS, num_blocks=20, enable_prefix_caching=True, max_num_batched_tokens=128) as engine:
        (idle,) = exposed()
        assert idle.values["free_blocks"] == idle.values["pool_blocks"] == 19
        prefix = tokens(70)
        engine.submit(prefix + tokens(20), 60, vtoken_off=1)
        for _ in range(2):
            engine.step()
        for count in (130, 90, 140):  # they find the prefix, and its first holder keeps it
            engine.submit(prefix + tokens(count), 40)
        seen, watched = [], watch_usage(engine)
        while engine.engine.has_unfinished_requests():
            publisher(engine)._due = 0.0  # at each pass
            engine.step()
            seen += exposed()
            last = seen[-1].values
            assert last["held_blocks"] + last["free_blocks"] + last["in_flight_blocks"] == 19
            assert 0 <= last["fragmentation"] <= 1
        engine.engine.engine_core.engine_core.scheduler.schedule()  # a server's engine makes one more pass
        (at_end,) = exposed()
        shown_elsewhere = {"plans_refused", "verification_failures"}  # the naive variant's, and verification's
        assert set(at_end.values) == {metric.name for metric in METRICS} - shown_elsewhere
        side, values = engine.scheduler.vtoken, at_end.values
        counters = side.counters
        assert values["evicted_tokens"] == counters.num_evicted_tokens > 100
        assert values["recycled_slots"] == counters.num_recycled_tokens == engine.counts["recycled"] > 0
        assert values["moved_tokens"] == engine.counts["moves"] == engine.runner.vtoken.num_moved_tokens > 0
        assert values["moved_bytes"] == engine.counts["moves"] * 2 * 2 * 2 * 32 * 4  # K, V; layers; heads; size; f32
        assert values["freed_blocks"] == counters.num_freed_blocks > 0
        assert values["plans"] == counters.num_plans > 0
        assert values["unhashed_blocks"] == side.ledger.pool.num_unhashed > 0
        assert values["copied_blocks"] == side.ledger.pool.num_copied > 0
        assert values["postponed_kills"] == side.num_postponed
        assert 0 < values["planner_seconds"] < 60
        assert 0 < values["policy_seconds"] < 60
        assert values["held_blocks"] == values["live_tokens"] == values["fragmentation"] == 0
        assert max(each.values["live_tokens"] for each in seen) > 3 * 60
        assert max(each.values["held_blocks"] for each in seen) > 6
        assert any(usage.live_tokens > blocks.held * 32 for blocks, usage in watched), "blocks were shared"


def test_the_naive_variant_shows_what_it_cannot_give_back(world, tokens, exposed):
    with world({**SETTINGS, "variant": "naive"}) as engine:
        said = watch_usage(engine)
        engine.submit(tokens(200), 40)
        engine.submit(tokens(90), 40)
        engine.run()
        publisher(engine)._due = 0.0
        engine.core.scheduler.schedule()
        (at_end,) = exposed()
        refused = engine.scheduler.vtoken.manager.refused
        assert at_end.values["plans_refused"] == refused == {"no block without a live token": refused.total()}
        assert refused.total() > 0
    assert max(usage.reclaimable for _, usage in said) > 3
    assert max(usage.fragmentation for _, usage in said) > 0.5


def test_what_verification_finds_is_counted(world, tokens, exposed):
    with world({**SETTINGS, "verify": True}) as engine:
        engine.submit(tokens(40), 20, vtoken_off=1)
        engine.step()
        (said,) = exposed()
        assert said.values["verification_failures"] == 0
        (req_id,) = engine.scheduler.requests
        engine.scheduler.vtoken.ledger.manager.num_evicted[req_id] = 1  # its table knows of no dead token
        for _ in range(3):
            publisher(engine)._due = 0.0
            engine.step()
        (said,) = exposed()
        assert said.values["verification_failures"] == 1


def test_metrics_can_be_left_out(world, exposed):
    with world({**SETTINGS, "metrics": False}) as engine:
        assert not any(isinstance(part, _publisher_class()) for part in engine.scheduler.parts)
        assert exposed() == []


@pytest.mark.parametrize(
    "name",
    ["1:0", "999999999:3", f"{os.getpid()}:0", "nonsense", ""],
    ids=["another's", "no process", "no memory of ours", "nonsense", "empty"],
)
def test_a_channel_that_leads_nowhere_is_not_written_to(name, monkeypatch):
    from vtoken_torch.vllm_plugin.metrics.channel import CHANNEL, ChannelWriter

    monkeypatch.setenv(CHANNEL, name)
    assert ChannelWriter.open(0, ("model", "0")) is None


def test_several_engines_share_the_memory_and_half_a_message_is_not_shown(exposed):
    from vtoken_torch.vllm_plugin.metrics import channel

    writers = [channel.ChannelWriter.open(index, ("model", str(index))) for index in (0, 2)]
    for writer, held in zip(writers, (5, 7), strict=True):
        writer.write({"held_blocks": held})
    assert [(each.engine, each.values) for each in exposed()] == [("0", {"held_blocks": 5}), ("2", {"held_blocks": 7})]
    os.pwrite(writers[0]._fd, b"x", 20)  # as a writer that was stopped in the middle
    assert [each.engine for each in exposed()] == ["2"]
    for writer in writers:
        writer.close()
    assert [each.engine for each in exposed()] == ["2"], "what was said last stays"


def test_the_memory_is_named_for_children_once(monkeypatch):
    """What ``register`` does in a server; an engine's process, which finds the name, makes no memory of its own."""
    from prometheus_client import REGISTRY

    from vtoken_torch.vllm_plugin.metrics import exposition
    from vtoken_torch.vllm_plugin.metrics.channel import CHANNEL

    monkeypatch.setenv(CHANNEL, "")
    monkeypatch.delenv(CHANNEL)
    made = []
    monkeypatch.setattr(REGISTRY, "register", made.append)
    exposition.expose_engines()
    exposition.expose_engines()
    assert len(made) == 1
    pid, fd = os.environ[CHANNEL].split(":")
    assert int(pid) == os.getpid()
    assert str(Path(f"/proc/self/fd/{fd}").readlink()).startswith("/memfd:")
    os.close(int(fd))
