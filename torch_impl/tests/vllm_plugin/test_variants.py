"""native, naive and vtoken on one victim trace."""

import pytest

from vtoken.trace import VictimTrace

SETTINGS = {"policy": "random", "kv_budget": 60, "interval": 8, "when": "always"}


def _events(path):
    trace = VictimTrace.load(path)
    return {key: trace.events[key] for key in sorted(trace.events)}


@pytest.mark.parametrize(
    ("policy", "caching"),
    [("random", False), ("random", True), ("h2o", False)],
    ids=["plain", "prefix caching", "by attention mass"],
)
def test_naive_and_vtoken_choose_the_same_victims_and_say_the_same(world, reference, tokens, tmp_path, policy, caching):
    prompts = [tokens(count) for count in (150, 70, 220)]
    said, held = {}, {}
    for variant in ("naive", "vtoken"):
        settings = {**SETTINGS, "policy": policy, "variant": variant, "record_trace": str(tmp_path / variant)}
        with world(settings, enable_prefix_caching=caching) as engine:
            said[variant] = engine.generate(prompts, 60)
            held[variant] = engine.scheduler.vtoken.counters.num_freed_blocks
            engine.assert_exact(reference)
            engine.assert_nothing_left()
    assert said["naive"] == said["vtoken"]
    assert _events(tmp_path / "naive") == _events(tmp_path / "vtoken")
    assert held["vtoken"] > 0
    if policy == "random":  # its victims are scattered
        assert held["naive"] < held["vtoken"]


def test_a_recorded_trace_is_replayed_whatever_the_policy(world, reference, tokens, tmp_path):
    prompts = [tokens(count) for count in (150, 70, 220)]
    with world({**SETTINGS, "record_trace": str(tmp_path / "trace")}) as engine:
        said = engine.generate(prompts, 60)
        deaths = [engine.outcomes[key].epochs[0].deaths for key in range(3)]
    replay = {"policy": "none", "replay_trace": str(tmp_path / "trace"), "when": "always"}
    with world(replay, max_num_batched_tokens=512) as engine:
        assert engine.generate(prompts, 60) == said
        assert [sorted(engine.outcomes[key].epochs[0].deaths) for key in range(3)] == [sorted(each) for each in deaths]
        engine.assert_exact(reference)
        engine.assert_nothing_left()


@pytest.mark.parametrize("variant", ["naive", "vtoken"])
def test_a_trace_brings_the_same_deaths_in_another_layout(world, reference, tokens, tmp_path, variant):
    """Recorded with each prompt in one chunk; another pool, smaller chunks and shared blocks change none."""
    prefix = tokens(70)
    prompts = [prefix + tokens(count) for count in (80, 20, 150)]

    def deaths(engine):
        return [[sorted(epoch.deaths) for epoch in engine.outcomes[key].epochs] for key in range(3)]

    with world({**SETTINGS, "record_trace": str(tmp_path / "trace")}) as engine:
        said, recorded = engine.generate(prompts, 60), deaths(engine)
        engine.assert_exact(reference)
        num_steps = engine.counts["steps"]
    replay = {"policy": "none", "variant": variant, "replay_trace": str(tmp_path / "trace"), "when": "always"}
    other = {"num_blocks": 33, "max_num_batched_tokens": 48, "enable_prefix_caching": True}
    with world(replay, **other) as engine:
        for prompt in prompts:
            engine.submit(prompt, 60)
            for _ in range(3):
                engine.step()
        engine.run()
        engine.assert_exact(reference)
        engine.assert_nothing_left()
        assert [engine.outcomes[key].tokens for key in range(3)] == said
        assert deaths(engine) == recorded
        assert engine.outcomes[1].num_cached == 64
        assert engine.counts["steps"] + 9 != num_steps
        assert all(len(epochs) == 1 and len(epochs[0]) > 20 for epochs in recorded)


def test_naive_holds_what_a_layout_without_moves_would_hold(world, tokens):
    with world({**SETTINGS, "variant": "naive"}) as engine:
        scheduler = engine.scheduler
        ledger, manager = scheduler.vtoken.ledger, scheduler.vtoken.ledger.manager
        seen = []
        schedule = scheduler.schedule

        def watched(*args, **kwargs):
            output = schedule(*args, **kwargs)
            for req_id, table in ledger.unmoved.items():
                blocks_alive = {position // 32 for position in table.live_positions()}
                blocks_alive.add((table.num_computed_tokens - 1) // 32)
                held = len(manager.req_to_blocks[req_id]) + len(manager.parked.get(req_id, ()))
                assert held == len(blocks_alive)
                seen.append(held > len(manager.req_to_blocks[req_id]))
            return output

        scheduler.schedule = watched
        engine.generate([tokens(150), tokens(260)], 60)
        assert any(seen), "no block was ever parked"
        engine.assert_nothing_left()
