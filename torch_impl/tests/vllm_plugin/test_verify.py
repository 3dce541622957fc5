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


@pytest.mark.parametrize("is_async", [False, True], ids=["in step", "async"])
def test_a_break_of_a_request_whose_mass_is_collected_fails_it_alone(world, reference, tokens, monkeypatch, is_async):
    """Its step is led astray, so that the mass of that step is of other tokens."""
    from vtoken.invariants import Violation

    with world({**ALWAYS, "policy": "h2o"}, async_scheduling=is_async) as engine:
        part = checks(engine)
        check = part._check_table

        def break_one(table, record):
            check(table, record)
            if table.req_id.startswith("1-") and table.num_evicted_tokens:
                raise Violation(8, table.req_id, "dead tokens", 0, 1)

        monkeypatch.setattr(part, "_check_table", break_one)
        for length in (90, 100, 110):
            engine.submit(tokens(length), 40)
        engine.run()
        assert [(finding.number, finding.req_id[:2]) for finding in part.findings] == [(8, "1-")]
        assert [len(engine.outcomes[key].tokens) == 40 for key in range(3)] == [True, False, True]
        engine.assert_exact(reference, {0, 2})
        engine.assert_nothing_left()
