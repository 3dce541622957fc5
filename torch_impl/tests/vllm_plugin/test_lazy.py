"""Lazy mode on the real engine: deaths only mark, attention skips dead slots, evacuation gives blocks back."""

import json
from itertools import pairwise

import pytest

from vtoken.trace import VictimTrace

POLICIES = ("random", "streaming_llm", "sliding_window", "h2o")
LAZY = {"policy": "random", "kv_budget": 60, "recent": 8, "interval": 8, "when": "always", "mode": "lazy"}


def test_every_policy_alone_in_chunks_and_together(world, reference, tokens):
    with world(LAZY, max_num_batched_tokens=100) as engine:
        engine.submit(tokens(150), 20)
        engine.run()
        for index, length in enumerate((90, 7, 170, 33, 64, 130, 95, 210)):
            off = {"vtoken_off": True} if index == 3 else {"vtoken_policy": POLICIES[index % 4]}
            engine.submit(tokens(length), 24, **off)
        engine.run()
        engine.assert_exact(reference)
        engine.assert_nothing_left()
        assert engine.counts["peak running"] == 8
        counters = engine.scheduler.vtoken.counters
        assert counters.num_evicted_tokens > 400
        assert counters.num_recycled_tokens == counters.num_plans == 0, "memory was never short"


@pytest.mark.parametrize("is_async", [False, True], ids=["in step", "asynchronous"])
def test_evacuation_beside_shared_blocks_aborts_and_preemption(world, reference, tokens, is_async):
    """Under verification."""
    prefix = tokens(70)
    settings = {"num_blocks": 15, "enable_prefix_caching": True, "async_scheduling": is_async}
    with world({**LAZY, "verify": True}, **settings) as engine:
        engine.submit(prefix + tokens(60), 120, vtoken_off=True)  # it keeps the prefix, and outgrows the pool
        for length in (50, 40):
            engine.submit(prefix + tokens(length), 110)
        engine.submit(prefix + tokens(64), 120, vtoken_policy="streaming_llm")
        engine.run(abort_at={60: 1})
        for part in engine.scheduler.parts:
            assert not getattr(part, "findings", None), part.findings
        engine.assert_exact(reference)
        engine.assert_nothing_left()
        assert engine.counts["moves"] > 20
        assert engine.counts["preemptions"] > 0
        assert sum(outcome.num_cached for outcome in engine.outcomes.values()) >= 64


def test_shared_blocks_may_have_holes_and_stay_held(world, reference, tokens):
    from vtoken_torch.vllm_plugin.metrics.readings import Readings

    prefix = tokens(96)
    with world(LAZY, enable_prefix_caching=True) as engine:
        engine.submit(prefix + tokens(5), 60, vtoken_off=True)
        engine.step()
        engine.submit(prefix + tokens(40), 40, vtoken_policy="streaming_llm", vtoken_budget=30)
        for _ in range(30):
            engine.step()
        (first, second) = engine.scheduler.vtoken.ledger.tables.values()
        assert first.block_ids[:3] == second.block_ids[:3]
        assert first.num_live_tokens == first.num_computed_tokens
        assert not any(second.live_words[1:3])
        used = {*first.live_slots(), *second.live_slots()}
        held = {*first.block_ids, *second.block_ids}
        usage = Readings(engine.scheduler).usage(len(held))
        assert usage.fragmentation == pytest.approx(1 - len(used) / (32 * len(held)))
        assert usage.live_tokens == first.num_live_tokens + second.num_live_tokens
        cached = [block.block_id for block in engine.pool.blocks if block.block_hash is not None]
        assert cached.count(second.block_ids[3]) == 1, "full before the first death"
        assert second.cursor > 160
        assert not set(cached) & set(second.block_ids[4:]), "hashed after the first death"
        engine.run()
        engine.assert_exact(reference)
        engine.assert_nothing_left()


def test_the_trigger(world, reference, tokens, tmp_path):
    """Nothing is moved while memory is ample; then held blocks fall, and no sooner again than ``cooldown_steps``."""
    timeline = tmp_path / "timeline.jsonl"
    settings = {**LAZY, "low_watermark": 0.5, "cooldown_steps": 12, "headroom": 0.0, "timeline": str(timeline)}
    with world(settings, num_blocks=15) as engine:
        side, plans = engine.scheduler.vtoken, []
        launch = side.ledger.launch

        def watched(plan):
            table, pool = side.ledger.table(plan.req_id), side.ledger.pool
            plans.append((side._step, table.fragmentation, pool.num_free, len(table.block_ids), plan))
            launch(plan)

        side.ledger.launch = watched
        engine.submit(tokens(200), 150)
        engine.run()
        engine.assert_exact(reference)
        engine.assert_nothing_left()
        assert len(plans) >= 2
        assert all(second[0] - first[0] >= 12 for first, second in pairwise(plans))
        for _, fragmentation, num_free, _, plan in plans:
            assert fragmentation > 0.25
            assert num_free <= 7
            assert len(plan.freed_block_ids) >= 2
            assert plan.num_blocks_gained >= 1
    events = [event.get("event") for event in map(json.loads, timeline.read_text().splitlines())]
    assert events.index("trigger") < events.index("commit")
    assert (events.count("trigger"), events.count("commit")) == (1, len(plans))


def test_a_request_that_could_not_grow_is_evacuated_at_once(world, reference, tokens):
    """The trigger itself would wait for ever."""
    settings = {**LAZY, "low_watermark": 0.0, "cooldown_steps": 10**6, "theta_fragmentation": 0.1}
    with world(settings, num_blocks=10, max_num_batched_tokens=64) as engine:
        engine.submit(tokens(300), 150)  # 450 tokens in 9 blocks of 32
        engine.run()
        engine.assert_exact(reference)
        engine.assert_nothing_left()
        assert engine.counts["preemptions"] == 0
        assert engine.scheduler.vtoken.counters.num_plans >= 2


def test_lazy_eager_and_naive_on_one_victim_trace(world, reference, tokens, tmp_path):
    prompts = [tokens(count) for count in (150, 70, 220)]
    said, deaths, held = {}, {}, {}
    variants = {"eager": {}, "lazy": {"mode": "lazy", "low_watermark": 1.0}, "naive": {"variant": "naive"}}
    record = {**LAZY, "mode": "eager", "record_trace": str(tmp_path / "trace")}
    replay = {"policy": "none", "when": "always", "replay_trace": str(tmp_path / "trace")}
    for name, changes in variants.items():
        with world({**(replay if said else record), **changes}, num_blocks=33) as engine:
            for prompt in prompts:
                engine.submit(prompt, 45)
            engine.run()
            said[name] = [outcome.tokens for outcome in engine.outcomes.values()]
            deaths[name] = [sorted(outcome.epochs[0].deaths) for outcome in engine.outcomes.values()]
            held[name] = engine.scheduler.vtoken.counters.num_freed_blocks
            engine.assert_exact(reference)
            engine.assert_nothing_left()
    assert said["lazy"] == said["eager"] == said["naive"]
    assert deaths["lazy"] == deaths["eager"] == deaths["naive"]
    events = VictimTrace.load(tmp_path / "trace").events
    assert sum(len(event.chosen) for key in range(3) for event in events[key]) > 200
    assert held["naive"] < held["lazy"]


@pytest.mark.parametrize("delay", [None, 1], ids=["never", "one step late"])
def test_live_words_that_are_not_told_in_time_are_noticed(world, reference, tokens, monkeypatch, delay):
    from vtoken_torch.vllm_plugin.lazy.ledger import LazyLedger

    take, late = LazyLedger.take_record, [{}] * (delay or 0)

    def mutant(self):
        record = take(self)
        late.append(record.live_words)
        record.live_words = late.pop(0) if delay else {}
        return record

    monkeypatch.setattr(LazyLedger, "take_record", mutant)
    with world(LAZY) as engine:
        engine.submit(tokens(90), 16)
        engine.run()
        with pytest.raises(AssertionError, match=r"other tokens|logprobs differ"):
            engine.assert_exact(reference)


def test_verification_notices_live_words_that_are_not_told(world, tokens, monkeypatch):
    from vtoken_torch.vllm_plugin.lazy import ledger

    changed = ledger.changed_words
    monkeypatch.setattr(ledger, "changed_words", lambda table, blocks: changed(table, list(blocks)[:1]))
    with world({**LAZY, "verify": True}) as engine:
        engine.submit(tokens(90), 16)
        engine.run()
        (checks,) = [part for part in engine.scheduler.parts if type(part).__name__ == "OnlineChecks"]
        assert "live word told of block" in checks.findings[0].what
        engine.assert_nothing_left()
