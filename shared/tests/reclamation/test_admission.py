from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vtoken.config import VTokenConfig
from vtoken.reclamation.admission import Answer, PoolCounters, admission, count_pool, reclaimable_blocks

MakeWorld = Callable[..., Any]


def make_config(**options: Any) -> VTokenConfig:
    return VTokenConfig(**{"policy": "any", "kv_budget": 8, **options})


# -- counters (M-1) --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("picture", "blocks"),
    [("xxxx xx", 0), ("xx.x xx", 0), ("x.x. x.", 1), ("...", 1), (".... .... x", 2), ("x... x... x... x...", 3)],
)
def test_reclaimable_is_what_is_held_beyond_the_live_tokens(make_world: MakeWorld, picture: str, blocks: int) -> None:
    world = make_world()
    assert reclaimable_blocks(world.lay("a", picture), world.pool) == blocks


@given(st.lists(st.booleans(), min_size=1, max_size=40))
def test_reclaimable_is_what_a_fill_gives_back(make_world: MakeWorld, alive: list[bool]) -> None:
    world = make_world()
    table = world.lay("a", "".join("x" if live else "." for live in alive))
    promised, free = reclaimable_blocks(table, world.pool), world.pool.num_free
    plan = world.plan("fill", "a")
    if plan is not None:
        world.launch(plan)
    assert world.pool.num_free - free == promised


def test_shared_blocks_are_not_reclaimable(make_world: MakeWorld) -> None:
    world = make_world()
    table = world.lay("a", "xxxx xxxx x")
    world.fork_prefix("a", "b", 8)
    world.kill("a", [0, 1, 2, 3, 4, 8])
    assert reclaimable_blocks(table, world.pool) == 1
    world.finish("b")
    assert reclaimable_blocks(table, world.pool) == 2


def test_the_four_counters(make_world: MakeWorld) -> None:
    world = make_world(num_blocks=21, regime="fenced")
    world.lay("a", ".... .... x")
    world.lay("b", "x... x... x...")
    world.reclaim("release", "a")
    counters = count_pool(world.tables.values(), world.pool, make_config())
    assert counters == PoolCounters(total=20, free=14, reclaimable=2, in_flight=2, headroom=0)


@pytest.mark.parametrize(
    ("options", "headroom", "reclaimable"),
    [
        ({}, 0, 1),
        ({"mode": "lazy"}, 2, 1),
        ({"variant": "naive", "mode": "lazy"}, 0, 0),
        ({"variant": "native"}, 0, 0),
    ],
)
def test_headroom_is_for_lazy_mode_and_only_vtoken_reclaims(
    make_world: MakeWorld, options: dict[str, str], headroom: int, reclaimable: int
) -> None:
    world = make_world(num_blocks=21)
    world.lay("a", "x.x. x.")
    counters = count_pool(world.tables.values(), world.pool, make_config(headroom=0.06, **options))
    assert (counters.headroom, counters.reclaimable) == (headroom, reclaimable)


# -- answers (M-2) ---------------------------------------------------------------------------------------------------

COUNTERS = PoolCounters(total=20, free=6, reclaimable=3, in_flight=2, headroom=1)


@pytest.mark.parametrize(
    ("needed", "worst", "answer", "reason"),
    [
        (5, 9, Answer.ADMIT, "5 blocks are needed, 5 are free"),
        (6, 9, Answer.WAIT_FOR_RECLAMATION, "6 blocks are needed, 10 are free soon"),
        (10, 10, Answer.WAIT_FOR_RECLAMATION, "10 blocks are needed, 10 are free soon"),
        (11, 19, Answer.QUEUE, "11 blocks are needed, 10 are free even after reclamation"),
        (5, 20, Answer.NEVER_FITS, "needs 20 blocks at its worst, the pool has 19"),
    ],
)
def test_the_four_answers_name_their_numbers(needed: int, worst: int, answer: Answer, reason: str) -> None:
    result = admission(COUNTERS, needed, worst)
    assert result.answer is answer
    assert reason in result.reason


def test_what_never_fits_is_told_what_would_help() -> None:
    assert "lower its budget or its length, or give the pool more blocks" in admission(COUNTERS, 1, 20).reason


def test_admission_counts_what_reclamation_gives_and_admits_after_it(make_world: MakeWorld) -> None:
    world = make_world(num_blocks=5)
    world.lay("a", "x... x... x... x...")

    def ask() -> Answer:
        return admission(count_pool(world.tables.values(), world.pool, make_config()), 3, 4).answer

    assert ask() is Answer.WAIT_FOR_RECLAMATION
    world.reclaim("fill", "a")
    assert ask() is Answer.ADMIT


def test_admission_waits_for_a_fence(make_world: MakeWorld) -> None:
    world = make_world(num_blocks=5, regime="fenced")
    world.lay("a", "x... x... x... x...")
    answers = []
    for step in (lambda: world.reclaim("fill", "a"), world.advance, world.reap):
        step()
        answers.append(admission(count_pool(world.tables.values(), world.pool, make_config()), 3, 4).answer)
    assert answers == [Answer.WAIT_FOR_RECLAMATION, Answer.WAIT_FOR_RECLAMATION, Answer.ADMIT]
