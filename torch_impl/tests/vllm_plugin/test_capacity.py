"""What a pool can hold: prompts longer than it, requests that never fit, and what lives at most."""

import pytest
from vllm_world import BLOCK

from vtoken.config import VTokenConfig
from vtoken.errors import SpecError
from vtoken_torch.vllm_plugin.capacity import Capacity

ALWAYS = {"policy": "streaming_llm", "kv_budget": 63, "interval": 16, "when": "always"}
PRESSURE = {**ALWAYS, "when": "pressure"}
SMALL = {"num_blocks": 9, "max_num_batched_tokens": 48}  # 8 blocks, 256 tokens; chunks end within blocks


def _held(engine):
    return sum(block.ref_cnt > 0 for block in engine.pool.blocks if not block.is_null)


# -- longer than the pool ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("settings", [ALWAYS, PRESSURE], ids=["always", "pressure"])
@pytest.mark.parametrize("chunk", [48, 100, 512], ids=lambda chunk: f"chunks of {chunk}")
def test_a_prompt_longer_than_the_pool_runs_alone_and_beside_others(world, reference, tokens, settings, chunk):
    with world(settings, **SMALL | {"max_num_batched_tokens": chunk}) as engine:
        engine.submit(tokens(400), 60)
        engine.run()
        assert engine.counts["preemptions"] == 0
        for length, max_tokens in ((401, 40), (70, 60), (333, 50), (30, 30)):
            engine.submit(tokens(length), max_tokens)
        engine.run()
        engine.assert_exact(reference)
        engine.assert_nothing_left()
        assert len(engine.outcomes[0].tokens) == 60
        assert {count for count, _ in engine.outcomes[0].epochs[0].deaths if count < 400}, "nothing died before its end"


def test_a_long_request_evicts_again_when_it_resumes(world, reference, tokens):
    with world({**PRESSURE, "policy": "random"}, num_blocks=9, max_num_batched_tokens=100) as engine:
        engine.submit(tokens(60), 190)  # short enough for the pool: it evicts under pressure alone
        engine.submit(tokens(60), 190, vtoken_off=True)
        engine.submit(tokens(300), 90)
        engine.run()
        engine.assert_exact(reference)
        engine.assert_nothing_left()
        assert engine.counts["preemptions"] > 0
        long = engine.outcomes[2]
        assert len(long.epochs) > 1, "it was never preempted"
        assert long.epochs[-1].deaths


def test_long_prompts_find_each_other_in_the_prefix_cache(world, reference, tokens):
    prompt = tokens(380)
    with world(PRESSURE, **SMALL, enable_prefix_caching=True) as engine:
        engine.submit(tokens(200), 4)  # its blocks fill the cache
        engine.run()
        for tail in (3, 40, 3):
            engine.submit(prompt + tokens(tail), 30)
        engine.run()
        engine.submit(prompt + tokens(1), 30)
        engine.run()
        assert max(outcome.num_cached for outcome in engine.outcomes.values()) > 0
        engine.assert_exact(reference)
        engine.assert_nothing_left()


def test_a_hit_is_cut_to_what_leaves_room_to_start(world, reference, tokens):
    prompt = tokens(256)
    with world({**ALWAYS, "kv_budget": 40}, num_blocks=9, enable_prefix_caching=True, max_model_len=600) as engine:
        engine.submit(prompt + tokens(1), 2, vtoken_budget=200)  # leaves up to 8 cached blocks, all that there are
        engine.run()
        engine.submit(tokens(90), 60, vtoken_off=True)  # holds 3 to 5 of the 8
        engine.submit(prompt + tokens(300), 20)
        engine.run()
        assert engine.counts["peak running"] == 2
        assert engine.counts["preemptions"] == 0
        engine.assert_exact(reference)
        engine.assert_nothing_left()


# -- never fits --------------------------------------------------------------------------------------------------------


def test_a_request_that_never_fits_is_a_value_error_with_both_numbers(world, reference, tokens):
    with world(ALWAYS, **SMALL) as engine:
        for length, max_tokens, own in (
            (300, 10, {"vtoken_off": True}),
            (100, 200, {"vtoken_policy": "none"}),
            (400, 10, {"vtoken_budget": 300}),
            (300, 10, {"vtoken_protect_prompt": True}),
            (300, 100, {"vtoken_ratio": 0.1}),
            (300, 10, {"vtoken_protect": [0, 250]}),
        ):
            with pytest.raises(ValueError, match=r"needs \d+ blocks at its worst, the pool has 8: lower its budget"):
                engine.submit(tokens(length), max_tokens, **own)
        engine.outcomes.clear()
        engine.submit(tokens(200), 56, vtoken_off=True)  # 256: exactly full
        engine.submit(tokens(300), 100, vtoken_ratio=0.6)
        engine.submit(tokens(300), 30, vtoken_protect=[0, 100])
        engine.run()
        engine.assert_exact(reference)
        engine.assert_nothing_left()


def test_a_request_that_never_fits_and_slips_through_ends_with_an_error(world, reference, tokens, monkeypatch):
    with world(ALWAYS, **SMALL) as engine:
        monkeypatch.setattr(Capacity, "check", lambda self, *args: None)
        engine.submit(tokens(60), 40)
        engine.submit(tokens(400), 30, vtoken_off=True)
        engine.submit(tokens(350), 30)
        said = {}
        while engine.engine.has_unfinished_requests():
            for output in engine.step():
                said[int(output.request_id)] = output.outputs[0]
        assert said[1].finish_reason == "error"
        assert "needs 14 blocks at its worst, the pool has 8" in said[1].stop_reason
        assert not said[1].token_ids
        assert [len(said[key].token_ids) for key in (0, 2)] == [40, 30]
        engine.assert_nothing_left()


def test_a_policy_that_gives_nothing_costs_its_long_request_alone(world, reference, tokens, monkeypatch):
    from vtoken.policies.random import RandomPolicy
    from vtoken.policies.sliding_window import SlidingWindowPolicy

    with world(PRESSURE, **SMALL) as engine:
        monkeypatch.setattr(RandomPolicy, "select_victims", lambda self, view: 1 / 0)
        monkeypatch.setattr(SlidingWindowPolicy, "select_victims", lambda self, view: [])
        reasons = {}
        engine.submit(tokens(90), 30)
        engine.submit(tokens(400), 30, vtoken_policy="random")
        engine.submit(tokens(350), 30, vtoken_policy="sliding_window")
        engine.submit(tokens(380), 30)
        for _ in range(600):
            for output in engine.step():
                reasons[int(output.request_id)] = output.outputs[0].finish_reason
        assert reasons == {0: "length", 1: "error", 2: "error", 3: "length"}
        assert [len(engine.outcomes[key].tokens) for key in (0, 3)] == [30, 30]
        engine.assert_exact(reference, keys=(0, 3))
        engine.assert_nothing_left()


def test_an_engine_whose_live_tokens_are_not_bounded_still_needs_a_pool_for_max_model_len(world):
    for settings in ({"policy": "none"}, {**ALWAYS, "protected": "prompt"}, {**ALWAYS, "variant": "naive"}):
        with pytest.raises(ValueError, match="To serve at least one request with the model's max seq len"):
            world(settings, **SMALL)
    with pytest.raises(ValueError, match="To serve at least one request"):
        world({**ALWAYS, "kv_budget": 250}, **SMALL)  # 250 + 32 tokens in 8 blocks of 32


# -- bounds ------------------------------------------------------------------------------------------------------------


def test_after_the_prompt_a_long_decode_holds_its_budget_at_every_step(world, reference, tokens):
    settings = {"policy": "streaming_llm", "kv_budget": 127, "interval": 32, "when": "always"}
    held = []
    with world(settings, num_blocks=33, max_model_len=1024) as engine:
        schedule = engine.scheduler.schedule

        def watched(*args, **kwargs):
            output = schedule(*args, **kwargs)
            held.append(_held(engine))
            return output

        engine.scheduler.schedule = watched
        engine.submit(tokens(100), 600)
        engine.run()
        engine.assert_exact(reference)
        engine.assert_nothing_left()
    assert max(held[1:]) <= (127 + 32) // BLOCK + 1 + 1
    assert max(held[200:]) == max(held[400:]), "it still grows"


# -- the numbers -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "bound"),
    [
        ({}, 64 + 32),
        ({"interval": 100}, 64 + 100),
        ({"num_sinks": 10, "recent": 80}, 90 + 32),
        ({"protected": ((0, 4), (2, 100))}, 100 + 32),
        ({"protected": "prompt"}, 700 + 32),
        ({"kv_budget": None, "eviction_ratio": 0.25}, 750 + 32),
        ({"kv_budget": 5000}, 1000),
        ({"policy": "none", "kv_budget": None}, 1000),
        ({"variant": "naive"}, 1000),
        ({"policy": "snapkv"}, 700 + 32),
        ({"policy": "paged_eviction", "page_size": 8}, 64 + 32),
        ({"policy": "paged_eviction", "page_size": 8, "protected": "prompt"}, 700 + 2 * 8 * 3 + 32),
    ],
)
def test_most_tokens_that_live_at_once(changes, bound):
    config = VTokenConfig(policy="streaming_llm", kv_budget=64, num_sinks=4, interval=16).with_changes(**changes)
    capacity = Capacity(config, block_size=32, num_blocks=8, step_tokens=512, max_model_len=2000)
    assert capacity.bound(config, prompt_len=700).at(1000) == bound


@pytest.mark.parametrize(
    ("changes", "bound"), [({}, 64), ({"kv_budget": 10}, 4 + 8), ({"kv_budget": 10, "recent": 20}, 4 + 20)]
)
def test_the_newest_tokens_live_on_until_the_score_pass_takes_them(changes, bound):
    config = VTokenConfig(policy="h2o", kv_budget=64, num_sinks=4, interval=16).with_changes(**changes)
    capacity = Capacity(config, block_size=32, num_blocks=8, step_tokens=512, max_model_len=2000, mass_every=8)
    assert capacity.bound(config, prompt_len=700).at(1000) == bound + 32
    random = config.with_changes(policy="random")
    assert capacity.bound(random, prompt_len=700).at(1000) == max(config.kv_budget, 4 + (config.recent or 0)) + 32


def test_a_refusal_names_what_is_needed_what_is_there_and_what_to_do():
    config = VTokenConfig(policy="streaming_llm", kv_budget=500)
    capacity = Capacity(config, block_size=32, num_blocks=8, step_tokens=512, max_model_len=2000)
    with pytest.raises(SpecError) as caught:
        capacity.check({}, prompt_len=1990, max_tokens=None)
    words = str(caught.value)
    assert "needs 18 blocks at its worst, the pool has 8" in words
    assert "lower its budget or its length, or give the pool more blocks" in words
    assert "1990 prompt tokens and up to 10 new ones" in words
    capacity.check({"vtoken_budget": 100}, prompt_len=1990, max_tokens=None)
