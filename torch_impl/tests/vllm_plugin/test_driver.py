"""What a pass touches: nothing of a request in which nothing is due. Tables that nobody looks at are told later."""

from collections import Counter

import pytest

from vtoken.invariants import check_counts

ALWAYS = {"policy": "streaming_llm", "kv_budget": 40, "interval": 16, "when": "always"}


def _unwatched(engine):
    """No pass is checked, so that no table is looked at but by the driver itself."""
    engine.scheduler.__dict__.pop("schedule")
    return engine


def _count_calls(monkeypatch, owner, *names):
    calls = Counter()

    def counted(name, bare):
        def call(*args, **kwargs):
            calls[name] += 1
            return bare(*args, **kwargs)

        return call

    for name in names:
        monkeypatch.setattr(owner, name, counted(name, getattr(owner, name)))
    return calls


def _decode(engine, tokens, lengths=(50, 60, 70), max_tokens=120, num_steps=30):
    for length in lengths:
        engine.submit(tokens(length), max_tokens)
    for _ in range(num_steps):
        engine.step()


@pytest.mark.parametrize(
    "settings", [{"policy": "none"}, {**ALWAYS, "when": "pressure"}], ids=["no policy", "ample memory"]
)
def test_a_pass_in_which_nothing_is_due_touches_no_request(world, tokens, monkeypatch, settings):
    with world(settings) as engine:
        _decode(_unwatched(engine), tokens)
        side = engine.scheduler.vtoken
        names = ("table", "sync", "recycle_from_here", "check_packed", "num_blocks_needed")
        calls = _count_calls(monkeypatch, side.ledger, *names)
        calls_of_side = _count_calls(monkeypatch, side, "end_step", "reclaim", "_begin")
        for _ in range(20):
            engine.step()
        assert not calls
        assert not calls_of_side
        assert [table.num_computed_tokens for table in side.ledger.tables.values()] == [
            request.num_computed_tokens for request in engine.scheduler.running
        ]
        assert calls["sync"] == 3  # 20 steps at once
        engine.run()
        engine.assert_nothing_left()


def test_in_steady_state_a_pass_recycles_without_a_look_at_any_table(world, reference, tokens, monkeypatch):
    with world(ALWAYS) as engine:
        _decode(_unwatched(engine), tokens, num_steps=18)
        side = engine.scheduler.vtoken
        calls = _count_calls(monkeypatch, side.ledger, "table", "recycle_from_here")
        events = _count_calls(monkeypatch, side.requests, "choose")
        before = side.counters.num_recycled_tokens
        for _ in range(48):
            engine.step()
        assert side.counters.num_recycled_tokens == before + 3 * 48
        assert calls["recycle_from_here"] == events["choose"] == 3 * 48 // 16  # from there on it goes by itself
        assert calls["table"] <= 5 * events["choose"]
        for table in side.ledger.tables.values():
            check_counts(table)
            assert table.num_live_tokens <= 40 + 16
        engine.run()
        engine.assert_exact(reference)
        engine.assert_nothing_left()


@pytest.mark.parametrize("caching", [False, True], ids=["", "prefix caching"])
@pytest.mark.parametrize("policy", ["random", "streaming_llm"])
def test_tables_that_are_told_late_say_the_same(world, reference, tokens, policy, caching):
    """Preemption, aborts, chunks and passes that give a recycling request no token."""
    settings = {"policy": policy, "kv_budget": 60, "interval": 12, "when": "always"}
    engine_settings = {"num_blocks": 17, "max_num_batched_tokens": 48, "enable_prefix_caching": caching}
    head = tokens(70)
    with world(settings, **engine_settings) as engine:
        _unwatched(engine)
        scheduler, steps = engine.scheduler, iter(range(10**6))
        full, schedule, passed_over = scheduler.max_num_scheduled_tokens, scheduler.schedule, set()

        def starved(*args, **kwargs):
            scheduler.max_num_scheduled_tokens = 2 if next(steps) % 5 == 4 else full
            output = schedule(*args, **kwargs)
            passed_over.update(scheduler.vtoken.ledger.recycling.keys() - output.num_scheduled_tokens.keys())
            return output

        scheduler.schedule = starved
        for length in (60, 20, 50, 33):
            engine.submit(head + tokens(length), 90)
        for _ in range(2):
            engine.submit(tokens(60), 180, vtoken_off=True)  # they outgrow the pool
        engine.run(abort_at={40: 0})
        engine.assert_exact(reference)
        engine.assert_nothing_left()
        assert passed_over
        assert engine.counts["preemptions"] > 0
        assert scheduler.vtoken.counters.num_recycled_tokens > 0


def test_alarms_of_requests_that_left_do_not_ring(world, tokens):
    with world({**ALWAYS, "interval": 40}) as engine:
        _decode(engine, tokens, num_steps=20)
        side = engine.scheduler.vtoken
        assert len(side._alarm_of) == 3
        engine.engine.abort_request(["0", "1", "2"])
        engine.step()
        assert not side._alarm_of
        engine.submit(tokens(50), 90)
        engine.run()
        assert not side._alarm_of


def test_a_table_out_of_step_with_the_kernels_is_noticed_in_the_pass_that_broke_it(world, tokens, monkeypatch):
    from vtoken.errors import InvariantError
    from vtoken_torch.vllm_plugin.driver import EngineDriver

    with world(ALWAYS) as engine:
        monkeypatch.setattr(EngineDriver, "reclaim", lambda self, req_id, force=False: 0)
        engine.submit(tokens(100), 20)
        with pytest.raises(InvariantError, match=r"INV-4: request '0.*expected a packed layout"):
            engine.run()
