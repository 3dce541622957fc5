"""The whole loop over a toy model: every output must be the oracle's, and every step must keep every invariant."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from serving_world import POLICIES, PREFIX, PROMPTS, SCORE_FREE, VARIANTS, budget_of, make_world, prompt_of

from vtoken.errors import SpecError
from vtoken.serving.protocol import SamplingParams


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_in_every_variant_gives_what_its_own_victims_leave_visible(policy: str, variant: str) -> None:
    """A tight pool, so that requests wait, evict under pressure, and are preempted; a shared prefix beside."""
    for when, regime in (("always", "ordered"), ("pressure", "fenced")):
        world = make_world(num_blocks=18, when=when, regime=regime, **budget_of(policy), **VARIANTS[variant])
        outputs = world.generate(PROMPTS, SamplingParams(max_tokens=18))
        assert {output.finish_reason for output in outputs} == {"length"}
        has_evicted = policy != "none" and variant != "native"
        assert (world.engine.counters.num_evicted_tokens > 0) == has_evicted
        assert world.engine.counters.num_evicted_tokens >= sum(output.num_evicted for output in outputs)


@pytest.mark.parametrize("regime", ["ordered", "fenced"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_one_trace_gives_the_same_tokens_in_every_variant(variant: str, regime: str) -> None:
    recorded = make_world(policy="random")
    outputs = recorded.generate(PROMPTS)
    options = VARIANTS[variant] if variant != "native" else {}
    replayed = make_world(policy="random", regime=regime, replay=recorded.trace, chunk_tokens=8, **options)
    assert [output.token_ids for output in replayed.generate(PROMPTS)] == [output.token_ids for output in outputs]
    assert replayed.runner.need is None


REQUESTS = st.lists(
    st.tuples(
        st.integers(0, 12),  # shared with others
        st.integers(1, 40),  # its own
        st.integers(1, 24),  # output
        st.integers(0, 20),  # arrival
        st.sampled_from([0.0, 0.7]),
        st.sampled_from([(), (3,), (5, 6)]),
    ),
    min_size=1,
    max_size=6,
)


@settings(max_examples=40)
@given(
    requests=REQUESTS,
    policy=st.sampled_from(POLICIES[:-1]),
    variant=st.sampled_from(sorted(VARIANTS)),
    when=st.sampled_from(["always", "pressure"]),
    regime=st.sampled_from(["ordered", "fenced"]),
    shape=st.tuples(st.integers(12, 30), st.integers(1, 5), st.sampled_from([3, 8, 16])),
    aborts=st.lists(st.tuples(st.integers(0, 40), st.integers(0, 5)), max_size=2),
)
def test_programs_of_late_joiners_and_aborts_end_as_the_oracle_says(
    requests: list[Any],
    policy: str,
    variant: str,
    when: str,
    regime: str,
    shape: tuple[int, int, int],
    aborts: list[tuple[int, int]],
) -> None:
    num_blocks, max_num_reqs, chunk = shape
    world = make_world(
        num_blocks=num_blocks,
        max_num_reqs=max_num_reqs,
        chunk_tokens=chunk,
        when=when,
        regime=regime,
        **budget_of(policy),
        **VARIANTS[variant],
    )
    arriving = sorted(enumerate(requests), key=lambda each: each[1][3])
    submitted: list[Any] = []
    steps = num_refused = 0
    while arriving or not world.engine.is_idle:
        while arriving and arriving[0][1][3] <= steps:
            seed, (num_shared, num_own, max_tokens, _, temperature, stops) = arriving.pop(0)
            params = SamplingParams(max_tokens=max_tokens, temperature=temperature, seed=seed, stop_token_ids=stops)
            try:
                request = world.engine.submit(PREFIX[:num_shared] + prompt_of(num_own, seed + 2), params)
            except SpecError:
                num_refused += 1
                continue
            submitted.append(request)
        world.engine.step()
        steps += 1
        for at, which in aborts:
            if at == steps and submitted:
                world.engine.abort(submitted[which % len(submitted)])
    world.check_end()
    world.check_outputs(
        [request.prompt for request in submitted],
        [request.sampling for request in submitted],
        [request.as_output() for request in submitted],
    )
    reasons = {request.finish_reason for request in submitted}
    can_exhaust = policy == "snapkv" or variant == "lazy"  # nothing dies in a prompt; half-full blocks stay as they are
    assert reasons <= {"stop", "length", "abort"} | ({"exhausted"} if can_exhaust else set())
    assert len(submitted) + num_refused == len(requests)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_request_gives_the_same_tokens_alone_and_in_a_batch(policy: str) -> None:
    prompts = [prompt_of(length, seed) for seed, length in enumerate((20, 3, 33, 9))]
    params = SamplingParams(max_tokens=20, temperature=1.0, seed=5)
    together = make_world(num_blocks=65, **budget_of(policy)).generate(prompts, params)
    for prompt, output in zip(prompts, together, strict=True):
        (alone,) = make_world(num_blocks=65, **budget_of(policy)).generate([prompt], params)
        assert alone == output


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("policy", SCORE_FREE)
def test_preemption_changes_no_token(policy: str, variant: str) -> None:
    prompts = [prompt_of(length, seed) for seed, length in enumerate((17, 9, 12, 4))]
    roomy = make_world(num_blocks=65, policy=policy, kv_budget=24, **VARIANTS[variant]).generate(prompts)
    tight = make_world(num_blocks=14, policy=policy, kv_budget=24, **VARIANTS[variant])
    outputs = tight.generate(prompts)
    assert [output.token_ids for output in outputs] == [output.token_ids for output in roomy]
    assert sum(output.num_preemptions for output in outputs) == tight.engine.counters.num_preemptions > 0
    assert outputs[0].num_preemptions == 0  # the oldest is never the one to go
