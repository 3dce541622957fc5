"""Requests that begin with the blocks of one that runs."""

from typing import Any

import pytest
from serving_world import World, make_world, prompt_of

from vtoken.serving.prefixes import find_parent
from vtoken.serving.protocol import SamplingParams
from vtoken.serving.requests import Request

PREFIX = prompt_of(14, seed=9)


def family(num_children: int) -> list[list[int]]:
    return [PREFIX + prompt_of(5 + seed, seed) for seed in range(num_children)]


def starts_of(world: World) -> dict[int, int]:
    """First position that each request computed."""
    starts: dict[int, int] = {}
    for report in world.reports:
        for index, row in report.rows:
            starts.setdefault(index, row.start)
    return starts


@pytest.mark.parametrize("regime", ["ordered", "fenced"])
@pytest.mark.parametrize("options", [{}, {"mode": "lazy"}, {"variant": "naive"}, {"variant": "native"}])
def test_children_hold_their_parents_blocks_and_say_the_same(options: dict[str, Any], regime: str) -> None:
    prompts = family(4)
    apart = make_world(share_prefixes=False, num_blocks=65, regime=regime, **options)
    expected = apart.generate(prompts)
    shared = make_world(num_blocks=65, regime=regime, **options)
    assert shared.generate(prompts) == expected
    assert starts_of(shared) == {0: 0, 1: 12, 2: 12, 3: 12}
    assert apart.runner.num_written - shared.runner.num_written == 3 * 12


def test_a_child_waits_for_its_prefix_and_no_longer() -> None:
    world = make_world(num_blocks=65, policy="none", kv_budget=None)
    world.generate([PREFIX + prompt_of(60), PREFIX + prompt_of(3, 1)], SamplingParams(max_tokens=2))
    firsts = [{index: row.start for index, row in report.rows} for report in world.reports]
    assert firsts[:3] == [{0: 0}, {0: 8}, {0: 16}]  # 12 tokens are common blocks, and they are there after two chunks
    assert starts_of(world)[1] == 12


def test_the_last_token_of_a_prompt_is_computed_by_its_own_request() -> None:
    world = make_world()
    world.generate([PREFIX[:12], PREFIX[:12]], SamplingParams(max_tokens=9))
    assert starts_of(world) == {0: 0, 1: 8}


def test_output_tokens_are_a_prefix_too() -> None:
    """The next turn of a chat, sent while the first still runs."""
    world = make_world(policy="none", kv_budget=None)
    first = world.engine.submit(PREFIX[:8], SamplingParams(max_tokens=20))
    for _ in range(12):
        world.engine.step()
    world.engine.submit([*first.prompt, *first.output[:6]], SamplingParams(max_tokens=3))
    while not world.engine.is_idle:
        world.engine.step()
    assert starts_of(world)[1] == 12
    world.check_end()


@pytest.mark.parametrize("policy", ["sliding_window", "streaming_llm"])
def test_blocks_from_which_tokens_died_or_moved_are_not_shared(policy: str) -> None:
    world = make_world(policy=policy, kv_budget=8, num_sinks=4)
    world.engine.submit(PREFIX, SamplingParams(max_tokens=40))
    for _ in range(20):
        world.engine.step()
    world.engine.submit(PREFIX, SamplingParams(max_tokens=3))
    while not world.engine.is_idle:
        world.engine.step()
    assert starts_of(world)[1] == (0 if policy == "sliding_window" else 4)
    world.check_end()


def test_the_request_with_the_most_to_share_is_the_parent() -> None:
    world = make_world(policy="none", kv_budget=None)
    short = world.engine.submit(PREFIX[:9], SamplingParams(max_tokens=20))
    long = world.engine.submit([*PREFIX, 1], SamplingParams(max_tokens=20))
    other = world.engine.submit(prompt_of(9, 3), SamplingParams(max_tokens=20))
    for _ in range(5):
        world.engine.step()
    running, tables = world.engine.batch.running, world.engine.pool.tables
    assert running == [short, long, other]

    def parent_of(prompt: list[int]) -> tuple[Request, int, int] | None:
        found = find_parent(Request(9, tuple(prompt), SamplingParams(), len(prompt)), running, tables)
        return found and (found.request, found.num_tokens, found.num_soon)

    assert parent_of([*PREFIX, 2]) == (long, 12, 12)
    assert parent_of([*PREFIX[:9], 2]) == (short, 8, 8)  # the oldest of equals
    assert parent_of(PREFIX[:4]) is None
    assert parent_of([7, *PREFIX]) is None
    for request in (short, long, other):
        world.engine.abort(request)
    world.check_end()


def test_a_parent_that_evicts_or_ends_takes_nothing_from_its_children() -> None:
    for policy in ("random", "h2o", "tova"):
        world = make_world(num_blocks=30, policy=policy, kv_budget=12)
        params = [SamplingParams(max_tokens=count) for count in (3, 30, 12)]
        outputs = world.engine.generate(family(3), params)
        world.check_end()
        world.check_outputs(family(3), params, outputs)


def test_a_prefix_beyond_the_childs_own_worst_case_takes_no_room_from_others() -> None:
    """Under pressure a parent may hold more than any budget; what its child need not write is not counted twice."""
    world = make_world(when="pressure", num_blocks=40, kv_budget=8)
    world.engine.submit(prompt_of(60), SamplingParams(max_tokens=30))
    for _ in range(9):
        world.engine.step()
    other = world.engine.submit(prompt_of(30, 1), SamplingParams(max_tokens=3))
    world.engine.step()  # it has 8 of the 20 tokens that it may ask for: 3 blocks are still promised to it
    child = Request(9, tuple(prompt_of(60)), SamplingParams(), 60)
    assert world.engine.batch.admission(child, 56).reason == "3 blocks are needed, 21 are free"
    assert other.computed == 8
    while not world.engine.is_idle:
        world.engine.step()
    world.check_end()


def test_a_broken_search_for_parents_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that compares block counts but not tokens."""
    monkeypatch.setattr(
        "vtoken.serving.prefixes._num_common_blocks",
        lambda child, other, size: min(len(child.prompt) - 1, other.num_known) // size,
    )
    with pytest.raises(AssertionError):
        make_world().generate([prompt_of(14, seed) for seed in range(3)])
