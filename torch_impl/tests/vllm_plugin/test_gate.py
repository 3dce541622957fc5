"""Who may start: nobody is held back for what will be evicted, and nobody waits for ever."""

import os
import random
from collections import Counter

import pytest

ALWAYS = {"policy": "streaming_llm", "kv_budget": 63, "interval": 16, "when": "always"}
PRESSURE = {**ALWAYS, "when": "pressure"}
SMALL = {"num_blocks": 9, "max_num_batched_tokens": 48}  # 8 blocks, 256 tokens; chunks end within blocks


@pytest.mark.parametrize("settings", [ALWAYS, PRESSURE], ids=["always", "pressure"])
def test_nobody_is_held_back_for_what_will_be_evicted(world, reference, tokens, settings):
    with world(settings, num_blocks=17, max_num_batched_tokens=512) as engine:
        for _ in range(6):
            engine.submit(tokens(250), 40)  # 8 blocks each as they come, 3 each as they stay: 5 fit into 16
        engine.run()
        assert engine.counts["peak running"] >= 5
        assert engine.counts["preemptions"] == 0
        engine.assert_exact(reference)
        engine.assert_nothing_left()


def test_a_request_with_a_budget_of_its_own_is_counted_by_it(world, reference, tokens):
    with world({**ALWAYS, "kv_budget": 200}, num_blocks=17) as engine:
        for _ in range(4):
            engine.submit(tokens(250), 30, vtoken_budget=40)
        engine.run()
        assert engine.counts["peak running"] == 4
        engine.assert_exact(reference)


@pytest.mark.parametrize("caching", [False, True], ids=["plain", "prefix caching"])
@pytest.mark.parametrize("settings", [ALWAYS, PRESSURE], ids=["always", "pressure"])
def test_two_long_requests_in_a_pool_for_one_and_a_half_both_end(world, reference, tokens, settings, caching):
    prompt = tokens(300)
    with world({**settings, "kv_budget": 130}, **SMALL, enable_prefix_caching=caching) as engine:
        for tail in (20, 55):
            engine.submit(prompt + tokens(tail), 60)
        engine.run()
        engine.assert_exact(reference)
        engine.assert_nothing_left()


def test_a_pool_that_is_exactly_full_goes_on(world, reference, tokens):
    free = []
    with world({**ALWAYS, "kv_budget": 32, "interval": 8}, num_blocks=9) as engine:  # and a chunk of 32: two blocks
        schedule = engine.scheduler.schedule

        def watched(*args, **kwargs):
            output = schedule(*args, **kwargs)
            free.append(engine.pool.get_num_free_blocks())
            return output

        engine.scheduler.schedule = watched
        for _ in range(6):
            engine.submit(tokens(120), 70)
        engine.run()
        assert min(free) == 0
        assert engine.counts["peak running"] == 4
        engine.assert_exact(reference)
        engine.assert_nothing_left()


def _run_drawn(world, reference, seed):
    draw = random.Random(seed)
    vtoken = {
        "policy": draw.choice(["random", "streaming_llm", "sliding_window"]),
        "kv_budget": draw.randrange(30, 150),
        "interval": draw.choice([1, 7, 16, 40]),
        "when": draw.choice(["always", "pressure"]),
        "keep_prompt_cache": draw.random() < 0.5,
        "recycle": draw.random() < 0.8,
    }
    settings = {
        "num_blocks": draw.choice([9, 10, 12]),
        "max_num_batched_tokens": draw.choice([16, 48, 100, 512]),
        "enable_prefix_caching": draw.random() < 0.8,
        "async_scheduling": draw.random() < 0.4,
    }
    prefixes = [[draw.randrange(3, 512) for _ in range(draw.randrange(64, 320))] for _ in range(2)]
    with world(vtoken, **settings) as engine:
        for _ in range(7):
            prompt = draw.choice([*prefixes, []]) + [draw.randrange(3, 512) for _ in range(draw.randrange(1, 120))]
            own = draw.choice([{}, {}, {"vtoken_budget": draw.randrange(30, 120)}])
            if len(prompt) < 100 and draw.random() < 0.5:
                own = {"vtoken_off": True}
            engine.submit(prompt, draw.randrange(10, 70), **own)
        engine.run(abort_at={draw.randrange(3, 120): draw.randrange(7) for _ in range(2)})
        engine.assert_exact(reference)
        engine.assert_nothing_left()
        pool = engine.scheduler.vtoken.ledger.pool
        return Counter(engine.counts, copied=pool.num_copied, unhashed=pool.num_unhashed)


def test_random_long_requests_in_small_pools_say_what_they_should_and_end(world, reference):
    met = Counter()
    for seed in range(int(os.environ.get("VTOKEN_CAPACITY_SEEDS", "8"))):
        try:
            met += _run_drawn(world, reference, seed)
        except Exception as error:
            error.add_note(f"seed {seed}")
            raise
    print(dict(met))
    for event in ("preemptions", "postponed", "copied", "unhashed", "recycled", "aborts"):
        assert met[event] > 0, f"no seed met {event}"
