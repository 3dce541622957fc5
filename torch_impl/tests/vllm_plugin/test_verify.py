"""Verification mode leaves a sound engine alone, and costs nothing while it is off."""

import pytest

ALWAYS = {"policy": "random", "kv_budget": 50, "recent": 8, "interval": 8, "when": "always", "verify": True}


def checks(engine):
    from vtoken_torch.vllm_plugin.verify.checks import OnlineChecks

    (part,) = [part for part in engine.scheduler.parts if isinstance(part, OnlineChecks)]
    return part


@pytest.mark.parametrize(
    ("changes", "settings"),
    [
        ({}, {"async_scheduling": True}),
        ({"variant": "naive"}, {}),
        ({"policy": "streaming_llm", "kv_budget": 90}, {"enable_prefix_caching": True, "max_num_batched_tokens": 96}),
        ({"policy": "streaming_llm", "kv_budget": 150, "recycle": False}, {"num_blocks": 17}),
    ],
    ids=["asynchronous", "naive", "prefix cache and chunks", "preemptions"],
)
def test_a_sound_engine_is_left_alone(world, reference, tokens, changes, settings):
    prompt = tokens(130)
    with world({**ALWAYS, **changes}, **settings) as engine:
        for length in (130, 40, 100, 130):
            engine.submit(prompt[:length], 120)
        engine.run()
        assert not checks(engine).findings
        assert engine.counts["moves"] > 30
        assert engine.counts["preemptions"] > 0 or "num_blocks" not in settings
        engine.assert_exact(reference)
        engine.assert_nothing_left()


def test_it_is_off_by_default(world):
    from vtoken_torch.vllm_plugin.verify.checks import OnlineChecks
    from vtoken_torch.vllm_plugin.verify.fingerprints import Fingerprints

    with world({"policy": "random", "kv_budget": 50}) as engine:
        parts = [*engine.scheduler.parts, *engine.runner.vtoken.parts]
        assert not any(isinstance(part, OnlineChecks | Fingerprints) for part in parts)
