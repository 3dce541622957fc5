from dataclasses import replace
from typing import Any

import pytest
from hf_world import World, prompt

from vtoken.serving.protocol import SamplingParams

PROMPTS = [prompt(5), prompt(37, 1), prompt(22, 2)]
POLICIES = ["random", "streaming_llm", "sliding_window", "h2o", "scissorhands", "tova", "snapkv", "paged_eviction"]
ALWAYS = {"kv_budget": 16, "interval": 4, "when": "always"}
MODES: dict[str, dict[str, Any]] = {
    "eager": {},
    "fill": {"recycle": False},
    "fenced": {"regime": "fenced"},
    "lazy": {"mode": "lazy", "low_watermark": 1.0, "cooldown_steps": 1, "theta_fragmentation": 0.1, "headroom": 0.1},
    "naive": {"variant": "naive"},
}
MODES["lazy_fenced"] = MODES["lazy"] | {"regime": "fenced"}


def own(policy: str) -> dict[str, Any]:
    return {"policy": policy, **ALWAYS} | ({"page_size": 4} if policy == "paged_eviction" else {})


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_in_every_mode_equals_a_masked_run(policy: str, mode: str) -> None:
    world = World(**own(policy), **MODES[mode])
    world.check(world.generate(PROMPTS, max_tokens=8))
    assert world.engine.counters.num_evicted_tokens > 0


def test_variant_native_evicts_nothing() -> None:
    world = World(**own("h2o"), variant="native")
    world.check(world.generate(PROMPTS, max_tokens=4))
    assert world.engine.counters.num_evicted_tokens == 0


def test_the_check_sees_a_single_victim() -> None:
    """Were one victim alive after all, the logits would differ by far more than the tolerance."""
    world = World(**own("random"))
    outputs = world.generate(PROMPTS, max_tokens=6)
    events = world.engine.trace.events[1]
    events[0] = replace(events[0], chosen=events[0].chosen[1:], died=events[0].died[1:])
    with pytest.raises(AssertionError):
        world.check(outputs)


@pytest.mark.parametrize("mode", ["eager", "lazy"])
@pytest.mark.parametrize("policy", ["random", "h2o"])
@pytest.mark.parametrize("name", ["mistral", "qwen2", "gpt_neox"])
def test_other_families_do_too(name: str, policy: str, mode: str) -> None:
    world = World(name, **own(policy), **MODES[mode])
    world.check(world.generate(PROMPTS, max_tokens=8))
    assert world.engine.counters.num_evicted_tokens > 0


@pytest.mark.parametrize("name", ["llama", "mistral", "qwen2"])
def test_without_eviction_it_is_the_plain_model(name: str) -> None:
    world = World(name)
    world.check(world.generate(PROMPTS))
    assert not world.engine.trace.events


def test_eager_mode_recycles_and_moves_and_lazy_mode_leaves_holes() -> None:
    eager, lazy = World(**own("random")), World(**own("random"), **MODES["lazy"])
    for world in (eager, lazy):
        world.generate(PROMPTS)
    assert eager.engine.counters.num_recycled_tokens > 0
    assert eager.engine.counters.num_moved_tokens > 0
    assert lazy.engine.counters.num_plans > 0
    assert lazy.engine.counters.num_recycled_tokens == 0


@pytest.mark.parametrize("policy", ["h2o"])
def test_requests_that_come_and_go_at_any_step(policy: str) -> None:
    world = World(**own(policy))
    engine = world.engine
    requests = []
    for number in range(12):
        if number % 2 == 0:
            requests.append(engine.submit(PROMPTS[number // 2 % len(PROMPTS)], SamplingParams(max_tokens=9)))
        engine.step()
    engine.loop.abort(requests[2])
    while not engine.loop.is_idle:
        engine.step()
    mixed = [report for report in world.reports if len({len(row.token_ids) > 1 for _, row in report.rows}) == 2]
    assert mixed, "no step held chunks and decoding rows at once"
    for request in requests:
        if request.finish_reason == "length":
            got = world.replay(request.index, [*request.prompt, *request.output])
            assert got.tokens == request.output


@pytest.mark.parametrize("policy", ["random", "tova"])
def test_a_preempted_request_is_rebuilt(policy: str) -> None:
    world = World(**own(policy) | {"kv_budget": 40}, num_blocks=22)
    outputs = world.generate([prompt(24, seed) for seed in range(4)], max_tokens=20)
    assert sum(output.num_preemptions for output in outputs) > 0
    world.check(outputs)


@pytest.mark.parametrize("policy", ["streaming_llm", "h2o"])
def test_a_prompt_longer_than_the_pool(policy: str) -> None:
    world = World(**own(policy), num_blocks=17, max_num_seqs=2)
    outputs = world.generate([prompt(120), prompt(90, 1)], max_tokens=6)
    assert all(output.finish_reason == "length" for output in outputs)
    world.check(outputs)


@pytest.mark.parametrize("policy", ["random", "h2o", "scissorhands"])
def test_requests_that_share_a_prefix(policy: str) -> None:
    world = World(**own(policy) | {"kv_budget": 26}, prefix_caching=True)
    common = prompt(16, 9)
    outputs = world.generate([common + prompt(8, seed) for seed in range(4)], max_tokens=12)
    assert any(steps[0][0] > 0 for steps in world.steps.values()), "nobody began with another's blocks"
    assert world.engine.counters.num_evicted_tokens > 0
    world.check(outputs)


def test_paired_variants_share_one_victim_trace_and_give_the_same_tokens() -> None:
    """The paper's comparison: who is dead is the same everywhere; only when memory comes back differs."""
    first = World(**own("tova"))
    outputs = first.generate(PROMPTS)
    blocks = {"eager": held_blocks(first)}
    for mode in ("lazy", "lazy_fenced", "naive"):
        world = World(**own("tova"), **MODES[mode], trace=first.engine.trace)
        assert [each.token_ids for each in world.generate(PROMPTS)] == [each.token_ids for each in outputs], mode
        assert world.engine.counters.num_evicted_tokens == first.engine.counters.num_evicted_tokens
        assert (world.engine.counters.num_moved_tokens > 0) == (mode != "naive")
        blocks[mode] = held_blocks(world)
    assert blocks["eager"] < blocks["lazy"] < blocks["naive"]


def held_blocks(world: World) -> int:
    """Held blocks, summed over all passes."""
    return sum(report.held_blocks for report in world.reports)
