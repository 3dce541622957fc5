"""Greedy tokens and logprobs on the real engine against transformers with an explicit mask."""

from itertools import pairwise

import pytest

POLICIES = {
    "none": {"vtoken_off": True},
    "random": {"vtoken_policy": "random", "vtoken_budget": 50, "vtoken_recent": 8},
    "streaming_llm": {"vtoken_policy": "streaming_llm", "vtoken_budget": 64},
    "sliding_window": {"vtoken_policy": "sliding_window", "vtoken_budget": 70},
}
ALWAYS = {"policy": "streaming_llm", "kv_budget": 64, "interval": 12, "when": "always"}


def test_every_policy_alone_and_together_with_the_others(world, reference, tokens):
    with world(ALWAYS) as engine:
        for settings in POLICIES.values():
            engine.submit(tokens(110), 40, **settings)
            engine.run()
        for length, settings in zip((90, 7, 200, 33, 64, 130, 95, 50), [*POLICIES.values()] * 2, strict=True):
            engine.submit(tokens(length), 45, **settings)
        engine.run()
        engine.assert_exact(reference)
        engine.assert_nothing_left()
        assert engine.counts["peak running"] == 8
        assert engine.counts["recycled"] > 150
        assert engine.counts["moves"] > 100


def test_without_evictions_the_output_is_plain_vllms(world, tokens):
    prompts = [tokens(count) for count in (100, 40, 200)]
    with world(None) as engine:
        plain = engine.generate(prompts, 40)
    ample = {**ALWAYS, "when": "pressure"}  # 64 blocks, of which the requests take 16
    for settings in ({**ALWAYS, "kv_budget": 400}, {**ALWAYS, "variant": "native"}, ample):
        with world(settings) as engine:
            assert engine.generate(prompts, 40) == plain
            assert engine.scheduler.vtoken.counters.num_evicted_tokens == 0
            engine.assert_nothing_left()


@pytest.mark.parametrize("chunk", [48, 100])
def test_chunked_prefill_evicts_between_the_chunks(world, reference, tokens, chunk):
    with world(ALWAYS, max_num_batched_tokens=chunk) as engine:
        for length, policy in ((300, "streaming_llm"), (170, "random"), (260, "sliding_window")):
            engine.submit(tokens(length), 30, vtoken_policy=policy)
        engine.run()
        engine.assert_exact(reference)
        engine.assert_nothing_left()
        deaths = engine.outcomes[0].epochs[0].deaths
        assert {count for count, _ in deaths if count < 300}, "nothing died before the prompt's end"


def test_preempted_requests_resume_and_repeat_their_evictions(world, reference, tokens):
    settings = {"policy": "random", "kv_budget": 70, "interval": 8, "when": "always"}  # asked again, it chose others
    with world(settings, num_blocks=17) as engine:
        for length in (100, 64, 80):
            engine.submit(tokens(length), 120, vtoken_off=True)
        engine.submit(tokens(110), 100)  # evicts until those before it need its blocks
        engine.run()
        assert engine.counts["preemptions"] > 0
        engine.assert_exact(reference)
        num_repeated = 0
        for outcome in engine.outcomes.values():
            for epoch, resumed in pairwise(outcome.epochs):
                dead = {position for _, position in epoch.deaths}
                first = min((count for count, _ in resumed.deaths), default=0)
                rebuilt = {position for count, position in resumed.deaths if count == first}
                assert dead <= rebuilt, "a victim lives again"
                num_repeated += len(dead)
        assert num_repeated > 0, "nobody was preempted who had evicted"
        engine.assert_nothing_left()


def test_abort_in_flight_gives_everything_back(world, reference, tokens):
    with world(ALWAYS) as engine:
        for length in (150, 60, 90, 210):
            engine.submit(tokens(length), 60)
        engine.run(abort_at={5: 1, 20: 0, 21: 3})
        assert engine.counts["aborts"] == 3
        engine.assert_exact(reference)
        engine.assert_nothing_left()


def test_of_two_tokens_within_rounding_either_is_the_greedy_one_and_no_third():
    import torch
    from vllm_reference import TIE, Epoch, Reference

    reference = object.__new__(Reference)
    reference.logprobs = lambda tokens, deaths: torch.tensor([[-1.0, -1.0 - TIE / 2, -1.0 - 2 * TIE]] * len(tokens))
    assert [reference.expected([0, token], 1, [Epoch()])[0][0] for token in (0, 1, 2)] == [0, 1, 0]


def test_of_two_victims_within_rounding_either_may_go_and_no_third():
    from vllm_mass_reference import assert_same_but_for_ties
    from vllm_reference import TIE

    score_of = {7: 1.0, 8: 1.0 + TIE / 2, 9: 1.0 + 2 * TIE, 10: float("nan")}
    for victims in ([7], [8]):
        assert_same_but_for_ties(victims, [7], score_of, "one")
    for victims in ([9], [], [7, 8]):
        with pytest.raises(AssertionError, match="instead of"):
            assert_same_but_for_ties(victims, [7], score_of, "one")
