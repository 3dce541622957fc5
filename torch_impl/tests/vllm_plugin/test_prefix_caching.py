"""The five rules that keep prefix caching on: copy what others hold, forget the hash of what is written, hash nothing
impure, keep what is merely given back, and wait where a copy finds no free block."""

import pytest
from vllm_world import BLOCK

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
        assert engine.outcomes[1].num_cached == 96  # given back unwritten; the fourth block was packed into
        engine.submit(prompt, 20, vtoken_off=True)  # what the second request computed is whole
        engine.run()
        assert engine.outcomes[2].num_cached == 160
        engine.assert_exact(reference)


@pytest.mark.parametrize(("budget", "num_cached"), [(150, 64), (100, 128)], ids=["written", "given back"])
def test_what_was_not_written_is_found_later(world, reference, tokens, budget, num_cached):
    """Two blocks stay whole. The third and fourth: part of the third is evicted and packed over, or all of both."""
    prompt = tokens(170)
    with world(FRONT, enable_prefix_caching=True) as engine:
        engine.submit(prompt, 4, vtoken_budget=budget, vtoken_protect=[0, 64])
        engine.run()
        engine.submit(prompt, 20, vtoken_off=True)
        engine.run()
        assert engine.outcomes[0].epochs[0].deaths
        assert engine.outcomes[1].num_cached == num_cached
        engine.assert_exact(reference)
        engine.assert_nothing_left()


def test_kv_computed_after_an_eviction_is_never_cached(world, reference, tokens):
    prompt = tokens(70)
    with world({**FRONT, "kv_budget": 80}, enable_prefix_caching=True) as engine:
        engine.submit(prompt, 110, vtoken_protect=[0, 64])
        engine.run()
        follow_up = prompt + engine.outcomes[0].tokens[:100]
        engine.submit(follow_up, 20, vtoken_off=True)
        engine.run()
        assert engine.outcomes[1].num_cached == 64  # two blocks that nothing was written into, and none behind them
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


def test_at_most_so_many_shared_blocks_are_left_in_one_pass(world, reference, tokens, monkeypatch):
    from vtoken_torch.vllm_plugin import sharing

    monkeypatch.setattr(sharing, "MAX_COPIED_BLOCKS", 2)
    prefix = tokens(256)
    with world({**SCATTERED, "kv_budget": 100}, enable_prefix_caching=True) as engine:
        engine.submit(prefix + tokens(4), 60, vtoken_off=True)  # holds the prefix's blocks all the while
        for count in (30, 41):
            engine.submit(prefix + tokens(count), 40)
        ledger, copied = engine.scheduler.vtoken.ledger, []
        launch = ledger.launch

        def watched(plan):
            blocks = engine.pool.blocks
            left = {move.src_slot // BLOCK for move in plan.moves} & set(plan.freed_block_ids)
            copied.append((ledger.pool.pass_number, sum(blocks[block_id].ref_cnt > 1 for block_id in left)))
            launch(plan)

        ledger.launch = watched
        engine.run()
        in_pass = {number: sum(count for each, count in copied if each == number) for number, _ in copied}
        assert max(in_pass.values()) == 2
        assert sum(in_pass.values()) >= 12, "the rest never followed"
        assert engine.counts["postponed"] > 0
        engine.assert_exact(reference)
        engine.assert_nothing_left()


def test_under_pressure_a_shared_block_is_left_alone_for_copies_free_nothing(world, reference, tokens):
    settings = {**SCATTERED, "when": "pressure", "interval": 64}
    prefix = tokens(160)
    with world(settings, num_blocks=17, enable_prefix_caching=True) as engine:
        engine.submit(prefix + tokens(4), 120, vtoken_off=True)
        for _ in range(3):
            engine.submit(prefix + tokens(20), 110)
        pool, shared = engine.scheduler.vtoken.ledger.pool, set()
        launch = engine.scheduler.vtoken.ledger.launch

        def watched(plan):
            moved_from = {move.src_slot // BLOCK for move in plan.moves}
            shared.update(block_id for block_id in moved_from if not pool.is_held_once(block_id))
            launch(plan)

        engine.scheduler.vtoken.ledger.launch = watched
        engine.run()
        assert engine.scheduler.vtoken.counters.num_evicted_tokens > 0
        assert not shared
        engine.assert_exact(reference)
        engine.assert_nothing_left()


@pytest.mark.parametrize("keeps", [True, False], ids=["kept", "not kept"])
def test_the_prompts_blocks_stay_in_the_cache_where_that_is_asked_for(world, reference, tokens, keeps):
    prompt = tokens(170)
    for settings in (FRONT, SCATTERED):
        with world({**settings, "keep_prompt_cache": keeps}, enable_prefix_caching=True) as engine:
            pool = engine.scheduler.vtoken.ledger.pool
            for _ in range(3):
                engine.submit(prompt, 40)
                engine.run()
            assert [engine.outcomes[key].num_cached == 160 for key in (1, 2)] == [keeps, keeps]
            assert (pool.num_unhashed == 0) == keeps
            assert (pool.num_copied > 0) == keeps
            engine.assert_exact(reference)
            engine.assert_nothing_left()


def test_cached_blocks_leave_the_cache_where_there_is_no_room_to_copy(world, reference, tokens):
    settings = {**SCATTERED, "keep_prompt_cache": True}
    with world(settings, num_blocks=9, enable_prefix_caching=True, max_num_batched_tokens=512) as engine:
        for length in (400, 330):
            engine.submit(tokens(length), 40)
        engine.run()
        assert engine.scheduler.vtoken.ledger.pool.num_unhashed > 0
        engine.assert_exact(reference)
        engine.assert_nothing_left()


@pytest.mark.parametrize("policy", ["random", "h2o", "streaming_llm"])
def test_who_holds_a_block_last_does_not_write_it_while_the_others_copy_out_of_it(world, reference, tokens, policy):
    """Six leave one prefix in one pass, whose copies may run in any order (INV-5)."""
    prefix = tokens(128)
    settings = {**SCATTERED, "policy": policy, "verify": True}
    with world(settings, enable_prefix_caching=True, max_num_batched_tokens=2048) as engine:
        for seed in range(6):
            engine.submit(prefix + tokens(20), 30, vtoken_seed=seed)
        engine.run()
        for part in engine.scheduler.parts:
            assert not getattr(part, "findings", None), part.findings
        engine.assert_exact(reference)
        engine.assert_nothing_left()
        assert engine.counts["moves"] > 100
