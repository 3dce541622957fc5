"""Random policies and random pools: variants agree, everybody ends, every block comes back."""

from collections.abc import Sequence
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from scheduler_world import VARIANTS, Engine, MakeWorld, make_config

from vtoken.policies import Policy, RequestView
from vtoken.policies.random import RandomPolicy
from vtoken.trace import VictimTrace
from vtoken.types import Position


class Arbitrary(Policy):
    """Chooses by a seeded hash among all candidates, as few or as many as it likes, whatever the budget."""

    name = "arbitrary"

    def __init__(self, seed: int, share: float) -> None:
        self.seed, self.share = seed, share

    def select_victims(self, view: RequestView) -> Sequence[Position]:
        def draw(position: int) -> float:
            return hash((self.seed, position, view.num_computed_tokens)) % 1000 / 1000

        return [position for position in view.live_positions[:-1] if draw(position) < self.share]


@settings(max_examples=40)
@given(
    seed=st.integers(0, 1000),
    share=st.floats(0, 0.6),
    prompts=st.lists(st.tuples(st.integers(1, 30), st.integers(0, 30)), min_size=1, max_size=3),
    interval=st.integers(1, 9),
    chunk=st.integers(1, 12),
    regime=st.sampled_from(["ordered", "fenced"]),
    stops=st.dictionaries(st.integers(1, 40), st.integers(0, 2), max_size=4),
)
def test_whatever_a_policy_chooses_all_variants_agree_and_every_invariant_holds(
    make_world: MakeWorld,
    seed: int,
    share: float,
    prompts: list[tuple[int, int]],
    interval: int,
    chunk: int,
    regime: str,
    stops: dict[int, int],
) -> None:
    trace = VictimTrace()
    outcomes = []
    for variant, options in VARIANTS.items():
        config = make_config(interval=interval, **options)
        victims = Arbitrary(seed, share) if variant == "eager" else trace
        engine = Engine(make_world(regime=regime, num_blocks=65), config, victims, trace.add, chunk)
        for index, (prompt_len, num_output) in enumerate(prompts):
            engine.submit(f"r{index}", prompt_len, num_output)
        steps = 0
        while engine.step():
            engine.world.check()
            steps += 1
            if stops.get(steps, 9) < len(prompts):
                engine.preempt(f"r{stops[steps]}")
        outcomes.append(engine.seen)
    assert all(outcome == outcomes[0] for outcome in outcomes)


class Crowded(Engine):
    """Requests leave at their end. Without room, relief is asked for, then the youngest holder is preempted."""

    def make_way(self) -> None:
        self.world.check()
        if not self.scheduler.relieve(queue_blocked=True):
            holders = [req_id for req_id in self.goals if self.world.tables[req_id].block_ids]
            assert len(holders) > 1, "one request alone does not fit"
            self.preempt(holders[-1])

    def run_all(self) -> None:
        while self.step():
            self.scheduler.relieve()
            self.world.check()
            for req_id, (_, _, total) in list(self.goals.items()):
                if self.world.tables[req_id].num_computed_tokens == total:
                    self.scheduler.finish(req_id)
                    del self.goals[req_id]


@settings(max_examples=60)
@given(
    options=st.sampled_from(list(VARIANTS.values())),
    when=st.sampled_from(["always", "pressure"]),
    regime=st.sampled_from(["ordered", "fenced"]),
    prompts=st.lists(st.tuples(st.integers(10, 30), st.integers(0, 20)), min_size=3, max_size=5),
    num_blocks=st.integers(14, 18),
    chunk=st.integers(1, 8),
    high=st.sampled_from([0.1, 0.5]),
)
def test_in_a_pool_too_small_for_all_everybody_ends_and_every_block_comes_back(
    make_world: MakeWorld,
    options: dict[str, Any],
    when: str,
    regime: str,
    prompts: list[tuple[int, int]],
    num_blocks: int,
    chunk: int,
    high: float,
) -> None:
    config = make_config(when=when, kv_budget=8, pressure_low=0.1, pressure_high=high, **options)
    engine = Crowded(make_world(num_blocks=num_blocks, regime=regime), config, RandomPolicy(), chunk=chunk)
    for index, (prompt_len, num_output) in enumerate(prompts):
        engine.submit(f"r{index}", prompt_len, num_output)
    engine.run_all()
    assert not engine.goals
    assert (engine.world.pool.num_free, engine.world.pool.num_in_flight) == (num_blocks - 1, 0)
