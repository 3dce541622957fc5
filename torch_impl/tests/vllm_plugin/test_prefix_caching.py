"""The five rules that keep prefix caching on: copy what others hold, forget the hash of what is written, hash nothing
impure, keep what is merely given back, and wait where a copy finds no free block."""

import pytest

SCATTERED = {"policy": "random", "kv_budget": 60, "recent": 8, "interval": 8, "when": "always"}
FRONT = {"policy": "streaming_llm", "kv_budget": 60, "interval": 8, "when": "always"}


@pytest.mark.parametrize("settings", [SCATTERED, FRONT], ids=["random", "streaming_llm"])
def test_requests_that_share_a_prefix_evict_each_for_itself(world, reference, tokens, settings):
    prefix = tokens(160)
    with world(settings, enable_prefix_caching=True) as engine:
        engine.submit(prefix + tokens(10), 5, vtoken_off=True)
        engine.run()
        for count in (30, 41, 3):
            engine.submit(prefix + tokens(count), 50)
        engine.submit(prefix + tokens(20), 30, vtoken_off=True)
        engine.run()
        assert all(engine.outcomes[key].num_cached == 160 for key in (1, 2, 3, 4))
        engine.assert_exact(reference)
        engine.assert_nothing_left()


def test_a_written_block_is_no_longer_found_and_an_untouched_one_is(world, reference, tokens):
    prompt = tokens(170)
    with world(FRONT, enable_prefix_caching=True) as engine:
        engine.submit(prompt, 4)
        engine.run()
        assert engine.scheduler.vtoken.ledger.pool.num_unhashed > 0
        engine.submit(prompt, 20, vtoken_off=True)
        engine.run()
        assert engine.outcomes[1].num_cached < 160
        engine.submit(prompt, 20, vtoken_off=True)  # what the second request computed is whole
        engine.run()
        assert engine.outcomes[2].num_cached == 160
        engine.assert_exact(reference)


def test_kv_computed_after_an_eviction_is_never_cached(world, reference, tokens):
    prompt = tokens(70)
    with world({**FRONT, "kv_budget": 40}, enable_prefix_caching=True) as engine:
        engine.submit(prompt, 110)
        engine.run()
        follow_up = prompt + engine.outcomes[0].tokens[:100]
        engine.submit(follow_up, 20, vtoken_off=True)
        engine.run()
        assert engine.outcomes[1].num_cached <= 64
        engine.assert_exact(reference)


def test_a_copy_out_of_a_shared_block_waits_for_a_free_block(world, reference, tokens):
    prefix = tokens(192)
    with world({**FRONT, "kv_budget": 180, "interval": 16}, num_blocks=17, enable_prefix_caching=True) as engine:
        engine.submit(prefix + tokens(3), 3, vtoken_off=True)
        engine.run()
        for _ in range(4):
            engine.submit(prefix + tokens(25), 90)
        engine.run()
        engine.assert_exact(reference)
        engine.assert_nothing_left()
        assert engine.counts["postponed"] > 0
