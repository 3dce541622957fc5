"""What else vLLM's scheduler can be told: priorities, limits on chunks, pauses, resets of the cache, sessions."""

import pytest

ALWAYS = {"policy": "random", "kv_budget": 60, "recent": 8, "interval": 8, "when": "always", "verify": True}
POLICIES = ("random", "streaming_llm", "h2o")


def finish(engine, reference):
    engine.run()
    for part in engine.scheduler.parts:
        assert not getattr(part, "findings", None), part.findings
    engine.assert_exact(reference)
    engine.assert_nothing_left()


@pytest.mark.parametrize("is_async", [False, True], ids=["in step", "async"])
def test_priorities_preempt_whoever_matters_least(world, reference, tokens, is_async):
    """Also one that this very pass has scheduled already."""
    settings = {"scheduling_policy": "priority", "num_blocks": 15, "async_scheduling": is_async}
    with world({**ALWAYS, "kv_budget": 90}, **settings) as engine:
        for priority in (3, 9, 2, 8, 1):
            engine.submit(tokens(60), 90, priority=priority, vtoken_policy=POLICIES[priority % 3])
        for _ in range(12):
            engine.step()
        engine.submit(tokens(70), 90, priority=0, vtoken_off=True)
        finish(engine, reference)
        assert engine.counts["preemptions"] > 0


@pytest.mark.parametrize(
    "limits",
    [
        {"long_prefill_token_threshold": 24},
        {"enable_chunked_prefill": False, "max_num_batched_tokens": 512},
    ],
    ids=str,
)
def test_chunks_of_other_sizes(world, reference, tokens, limits):
    with world(ALWAYS, num_blocks=17, **limits) as engine:
        for length, policy in zip((150, 33, 200, 90, 61), POLICIES * 2, strict=False):
            engine.submit(tokens(length), 50, vtoken_policy=policy)
        finish(engine, reference)


@pytest.mark.parametrize("is_async", [False, True], ids=["in step", "async"])
def test_a_reset_of_the_cache_preempts_all_between_two_passes(world, reference, tokens, is_async):
    with world(ALWAYS, enable_prefix_caching=True, async_scheduling=is_async) as engine:
        prefix = tokens(64)
        for length, policy in zip((50, 80, 20), POLICIES, strict=True):
            engine.submit(prefix + tokens(length), 60, vtoken_policy=policy)
        for _ in range(25):
            engine.step()
        assert engine.scheduler.reset_prefix_cache(reset_running_requests=True)
        assert engine.counts["preemptions"] == 3
        for outcome in engine.outcomes.values():
            outcome.epochs[-1].end -= is_async  # vLLM drops the token that was under way
        finish(engine, reference)


@pytest.mark.parametrize("state", ["PAUSED_ALL", "PAUSED_NEW"])
def test_a_paused_engine_goes_on_as_if_nothing_had_been(world, reference, tokens, state):
    from vllm.v1.core.sched.interface import PauseState

    with world(ALWAYS, num_blocks=17) as engine:
        for length, policy in zip((50, 180, 20), POLICIES, strict=True):
            engine.submit(tokens(length), 60, vtoken_policy=policy)
        for _ in range(3):
            for _ in range(9):
                engine.step()
            engine.submit(tokens(40), 30)
            engine.scheduler.set_pause_state(PauseState[state])
            for _ in range(4):
                engine.step()
            engine.scheduler.set_pause_state(PauseState.UNPAUSED)
        finish(engine, reference)


def test_prompt_logprobs(world, reference, tokens):
    prompt = tokens(150)
    with world(ALWAYS, max_num_batched_tokens=64, enable_prefix_caching=True) as engine:
        for policy in POLICIES:
            engine.submit(prompt, 20, sampling={"prompt_logprobs": 0}, vtoken_policy=policy)
        said = {}
        while engine.engine.has_unfinished_requests():
            for output in engine.step():
                if output.prompt_logprobs:
                    told = zip(prompt[1:], output.prompt_logprobs[1:], strict=True)
                    said[int(output.request_id)] = [ranks[token].logprob for token, ranks in told]
        finish(engine, reference)
        assert set(said) == {0, 1, 2}
        for key, logprobs in said.items():
            (epoch,) = engine.outcomes[key].epochs
            assert any(count < 150 for count, _ in epoch.deaths)
            table = reference.logprobs(prompt[:-1], epoch.deaths)
            expected = [float(table[index, token]) for index, token in enumerate(prompt[1:])]
            assert logprobs == pytest.approx(expected, abs=1e-4)


def test_a_session_that_is_fed_piece_by_piece_runs_without_eviction(world, reference, tokens):
    """Its first turn: vLLM 0.32 itself says nothing more in the next one, where its engine is driven by hand."""
    from vllm import SamplingParams
    from vllm.inputs import TokensPrompt
    from vllm.sampling_params import RequestOutputKind
    from vllm_reference import Epoch

    piece, said = tokens(110), []
    with world(ALWAYS) as engine:
        engine.submit(tokens(90), 80)
        params = SamplingParams(
            temperature=0, max_tokens=30, ignore_eos=True, logprobs=0, output_kind=RequestOutputKind.DELTA
        )
        request = engine.engine.input_processor.process_inputs(
            "1", TokensPrompt(prompt_token_ids=piece), params, supported_tasks=("generate",), resumable=True
        )
        request.external_req_id = "1"  # as AsyncLLM does it
        engine.engine.output_processor.add_request(request, None, None, 0)
        engine.engine.engine_core.add_request(request)
        engine.outcomes[1] = type(engine.outcomes[0])([])
        for _ in range(40):
            for output in engine.step():
                said += output.outputs[0].token_ids if output.request_id == "1" else []
        assert len(said) == 30
        engine.engine.abort_request(["1"])
        del engine.outcomes[1]
        finish(engine, reference)
    expected = reference.expected(piece + said, len(piece), [Epoch()])
    assert [token for token, _ in expected] == said
