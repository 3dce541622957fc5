"""Asynchronous scheduling: counts run one step ahead of the results, and a step on its way may be for nothing."""

import pytest

ALWAYS = {"policy": "streaming_llm", "kv_budget": 64, "interval": 12, "when": "always"}
TIGHT = {"policy": "streaming_llm", "kv_budget": 150, "interval": 8, "when": "always"}


@pytest.fixture
def async_world(world):
    return lambda vtoken, **settings: world(vtoken, async_scheduling=True, **settings)


def test_every_policy_says_what_it_says_in_step(world, async_world, reference, tokens):
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler

    from vtoken_torch.vllm_plugin.scheduler import VTokenScheduler

    policies = [{"vtoken_policy": name} for name in ("random", "streaming_llm", "sliding_window")] + [{"vtoken_off": 1}]
    prompts = [tokens(length) for length in (100, 40, 200, 90)]
    said = {}
    for build in (world, async_world):
        with build(ALWAYS) as engine:
            for prompt, policy in zip(prompts, policies, strict=True):
                engine.submit(prompt, 60, **policy)
            engine.run()
            engine.assert_exact(reference)
            engine.assert_nothing_left()
            assert engine.counts["recycled"] > 80
            assert isinstance(engine.scheduler, VTokenScheduler)
            is_async = build is async_world
            assert engine.runner.use_async_scheduling == isinstance(engine.scheduler, AsyncScheduler) == is_async
            said[build] = [(each.tokens, each.epochs[0].deaths) for each in engine.outcomes.values()]
    assert said[world] == said[async_world]


@pytest.mark.parametrize("caching", [False, True], ids=["plain", "prefix caching"])
def test_a_request_preempted_with_a_step_in_flight_keeps_its_token_and_resumes(async_world, reference, tokens, caching):
    prefix = tokens(32)
    with async_world(TIGHT, num_blocks=17, enable_prefix_caching=caching) as engine:
        for length in (28, 41, 90):
            engine.submit(prefix + tokens(length), 170)
        engine.submit(prefix + tokens(80), 170, vtoken_budget=64)  # the last one goes first: while it recycles
        engine.run(abort_at={110: 1})
        assert engine.counts["preemptions in flight"] > 0
        assert engine.counts["preempted recycles"] > 0
        assert engine.counts["aborts in flight"] == 1
        engine.assert_exact(reference)
        engine.assert_nothing_left()


def test_freed_blocks_serve_waiting_requests(async_world, reference, tokens):
    with async_world({**ALWAYS, "kv_budget": 63}, num_blocks=20, max_num_batched_tokens=128) as engine:
        for length in (256, 300, 120, 280, 200, 256):
            engine.submit(tokens(length), 80)
        engine.run()
        assert engine.counts["preemptions"] == 0
        assert engine.counts["peak running"] >= 4
        engine.assert_exact(reference)
        engine.assert_nothing_left()


def test_a_step_behind_the_last_token_does_no_harm(async_world, reference, tokens):
    """A stop token is seen one step late: that step has written, evicted, perhaps recycled for nothing."""
    settings = {**ALWAYS, "kv_budget": 40, "interval": 8}
    prompts = [tokens(length) for length in (50, 90, 61)]
    with async_world(settings, num_blocks=17) as engine:
        engine.generate(prompts, 60)
        for key, prompt in enumerate(prompts):
            said = engine.outcomes[key].tokens
            stop = next(token for token in said[25:] if token not in said[:25])
            engine.submit(prompt, 60, sampling={"stop_token_ids": [stop]})
            engine.submit(tokens(40), 50)  # takes the blocks over while that step is in flight
        engine.run()
        for key in (3, 5, 7):
            assert 25 < len(engine.outcomes[key].tokens) < 60
            deaths = engine.outcomes[key].epochs[0].deaths
            assert (
                max(count for count, _ in deaths) >= len(prompts[(key - 3) // 2]) + len(engine.outcomes[key].tokens) - 1
            )
        engine.assert_exact(reference)
        engine.assert_nothing_left()


def test_a_recycle_for_a_token_that_never_comes_is_taken_back(async_world, reference, tokens):
    """The last token is on its way: vLLM schedules nothing more for the request, and the victim lives on."""
    with async_world({**ALWAYS, "kv_budget": 40, "interval": 8}) as engine:
        engine.generate([tokens(50), tokens(60)], 30)
        engine.generate([tokens(60)], 40)
        assert engine.counts["passed over"] >= 3
        assert engine.scheduler.vtoken.counters.num_recycled_tokens == engine.counts["recycled"]
        engine.assert_exact(reference)
        engine.assert_nothing_left()


def test_aborts_with_a_step_in_flight_give_everything_back(async_world, reference, tokens):
    with async_world(ALWAYS, enable_prefix_caching=True) as engine:
        prefix = tokens(64)
        for length in (90, 20, 30, 150):
            engine.submit(prefix + tokens(length), 60)
        engine.run(abort_at={5: 1, 20: 0, 21: 3})
        assert engine.counts["aborts in flight"] == 3
        engine.assert_exact(reference)
        engine.assert_nothing_left()
