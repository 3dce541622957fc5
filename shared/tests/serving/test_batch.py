"""Who runs in which step, and what gives way where the pool is short."""

from collections.abc import Sequence
from itertools import chain
from typing import Any

import pytest
from serving_world import World, make_world, prompt_of

from vtoken.errors import SpecError
from vtoken.policies import Policy, RequestView
from vtoken.serving.protocol import SamplingParams

Step = list[tuple[int, int, int]]
"""Index, first position and number of tokens of each row."""


def steps_of(world: World) -> list[Step]:
    return [[(index, row.start, len(row.token_ids)) for index, row in report.rows] for report in world.reports]


def run(world: World) -> None:
    while not world.engine.is_idle:
        world.engine.step()
    world.check_end()


# -- who runs --------------------------------------------------------------------------------------------------------


def test_a_late_joiner_is_served_beside_those_that_decode() -> None:
    world = make_world()
    first = world.engine.submit(prompt_of(9), SamplingParams(max_tokens=12))
    for _ in range(4):
        world.engine.step()
    second = world.engine.submit(prompt_of(20, seed=1), SamplingParams(max_tokens=3))
    run(world)
    assert steps_of(world)[4] == [(0, 11, 1), (1, 0, 8)]
    both = (first, second)
    world.check_outputs(
        [each.prompt for each in both], [each.sampling for each in both], [each.as_output() for each in both]
    )


def test_a_chunk_is_never_cut_by_its_neighbours_and_no_younger_prompt_overtakes() -> None:
    world = make_world(num_blocks=65)
    world.generate([prompt_of(12), prompt_of(7, 1), prompt_of(3, 2)], SamplingParams(max_tokens=2))
    assert steps_of(world) == [
        [(0, 0, 8)],
        [(0, 8, 4)],  # the next prompt's 7 do not fit beside these 4, and the third waits its turn
        [(0, 12, 1), (1, 0, 7)],  # the last 1 is too little for the third
        [(1, 7, 1), (2, 0, 3)],
        [(2, 3, 1)],
    ]


def test_small_prompts_share_a_step() -> None:
    world = make_world(num_blocks=65)
    world.generate([prompt_of(3, seed) for seed in range(3)], SamplingParams(max_tokens=1))
    assert steps_of(world) == [[(0, 0, 3), (1, 0, 3)], [(2, 0, 3)]]


def test_requests_beyond_the_rows_wait() -> None:
    world = make_world(max_num_reqs=2, num_blocks=65)
    world.generate([prompt_of(5, seed) for seed in range(5)], SamplingParams(max_tokens=6))
    assert max(len(step) for step in steps_of(world)) == 2
    assert [index for index, start, _ in chain.from_iterable(steps_of(world)) if start == 0] == [0, 1, 2, 3, 4]


# -- pressure --------------------------------------------------------------------------------------------------------


def test_under_pressure_nothing_is_evicted_where_memory_is_ample() -> None:
    world = make_world(num_blocks=129, when="pressure")
    world.generate([prompt_of(20, seed) for seed in range(4)])
    assert world.engine.counters.num_evicted_tokens == 0


@pytest.mark.parametrize("regime", ["ordered", "fenced"])
def test_under_pressure_requests_give_what_they_have_before_anybody_is_preempted(regime: str) -> None:
    world = make_world(num_blocks=22, when="pressure", regime=regime)
    world.generate([prompt_of(20, seed) for seed in range(4)])
    counters = world.engine.counters
    assert counters.num_evicted_tokens > 0
    assert counters.num_preemptions == 0


def test_a_queue_that_is_blocked_makes_running_requests_give() -> None:
    world = make_world(num_blocks=20, when="pressure")
    world.engine.submit(prompt_of(50), SamplingParams(max_tokens=20))
    for _ in range(8):
        world.engine.step()
    assert world.engine.counters.num_evicted_tokens == 0
    world.engine.submit(prompt_of(40, seed=1), SamplingParams(max_tokens=3))
    world.engine.step()
    assert world.engine.counters.num_evicted_tokens > 0
    assert len(world.engine.batch.running) == 2
    run(world)


@pytest.mark.parametrize("when", ["always", "pressure"])
@pytest.mark.parametrize("regime", ["ordered", "fenced"])
@pytest.mark.parametrize("policy", ["streaming_llm", "h2o", "tova"])
def test_a_prompt_longer_than_the_pool_is_served_if_its_live_part_fits(policy: str, regime: str, when: str) -> None:
    world = make_world(num_blocks=10, regime=regime, when=when, policy=policy)
    outputs = world.generate([prompt_of(90), prompt_of(11, 1)])
    assert [output.finish_reason for output in outputs] == ["length", "length"]
    assert outputs[0].num_evicted > 70


def test_worst_cases_count_what_no_policy_may_choose() -> None:
    with pytest.raises(SpecError, match="needs 18 blocks at its worst, the pool has 17"):
        make_world(num_blocks=18, protected="prompt").engine.submit(prompt_of(60))


# -- preemption ------------------------------------------------------------------------------------------------------


def test_the_newest_is_preempted_and_comes_back_first() -> None:
    world = make_world(num_blocks=14, variant="native")
    outputs = world.generate([prompt_of(12, seed) for seed in range(4)])
    assert outputs[0].num_preemptions == 0
    assert sum(output.num_preemptions for output in outputs) > 0
    first_tokens = [index for index, _, _ in chain.from_iterable(steps_of(world))]
    assert [first_tokens.index(index) for index in range(4)] == sorted(first_tokens.index(index) for index in range(4))


def test_what_is_rebuilt_is_written_in_chunks_and_samples_nothing() -> None:
    world = make_world(num_blocks=14, variant="native")
    world.generate([prompt_of(12), prompt_of(12, 1)], SamplingParams(max_tokens=24))
    computed, goals = 0, []
    for _, row in (each for report in world.reports for each in report.rows if each[0] == 1):
        if row.start == 0 and computed:
            goals.append(computed)
        if goals and row.start < max(goals):
            assert len(row.token_ids) == min(8, max(goals) - row.start)
            assert row.sampling is None
        computed = row.start + len(row.token_ids)
    assert goals
    assert computed == 12 + 23


def test_fenced_blocks_are_waited_for_and_nobody_is_preempted() -> None:
    world = make_world(num_blocks=11, regime="fenced", policy="random", kv_budget=8, chunk_tokens=16)
    world.generate([prompt_of(60), prompt_of(16, 1)])
    assert world.engine.counters.num_preemptions == 0
    assert any(not report.rows for report in world.reports) or any(
        report.in_flight_blocks and len(report.rows) < 2 for report in world.reports
    )


class KeepsAll(Policy):
    """Promises a budget and drops nothing."""

    name = "keeps_all"

    def select_victims(self, view: RequestView) -> Sequence[int]:
        return ()


@pytest.mark.parametrize("options", [{}, {"mode": "lazy"}, {"regime": "fenced"}, {"when": "pressure"}])
def test_a_request_that_outgrows_the_pool_alone_ends_and_the_others_go_on(options: dict[str, Any]) -> None:
    world = make_world(num_blocks=10, policy_object=KeepsAll(), policy="keeps_all", **options)
    outputs = world.generate([prompt_of(60), prompt_of(5, 1)], SamplingParams(max_tokens=6))
    assert [output.finish_reason for output in outputs] == ["exhausted", "length"]
