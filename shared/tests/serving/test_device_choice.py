"""Victims chosen where the mass lies: the same as the host's, with no score brought over, and checked."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
from serving_world import ToyRunner, make_world, prompt_of

from vtoken.errors import InvariantError
from vtoken.policies import Choice
from vtoken.serving.protocol import RanksOnDevice

Choose = Callable[..., list[int]]
PROMPTS = [prompt_of(20), prompt_of(9, 1), prompt_of(33, 2)]


class DeviceRunner(ToyRunner):
    """Keeps its mass to itself."""

    def __init__(self, choose: Choose) -> None:
        super().__init__()
        self.choose = choose
        self.num_asked = self.num_with_positions = 0

    def lowest(self, row: int, positions: Sequence[int] | None, choice: Choice) -> list[int]:
        self.num_asked += 1
        self.num_with_positions += positions is not None
        live = [position for position, _ in self.visible(row, 10**6)]
        candidates = sorted(live) if positions is None else positions
        assert set(candidates) <= set(live)
        return self.choose(candidates, *self.mass[row].scores(candidates), choice)

    def scores(self, row: int, positions: Sequence[int]) -> Any:
        raise AssertionError("no score is brought to the host")


def test_a_runner_ranks_if_it_says_so(choose: Choose) -> None:
    assert isinstance(DeviceRunner(choose), RanksOnDevice)
    assert not isinstance(ToyRunner(), RanksOnDevice)


@pytest.mark.parametrize("when", ["always", "pressure"])
@pytest.mark.parametrize("policy", ["h2o", "tova", "snapkv", "scissorhands"])
def test_the_device_and_the_host_choose_the_same_victims(choose: Choose, policy: str, when: str) -> None:
    host = make_world(num_blocks=20, policy=policy, when=when)
    runner = DeviceRunner(choose)
    device = make_world(num_blocks=20, policy=policy, when=when, runner=runner)
    assert device.generate(PROMPTS) == host.generate(PROMPTS)
    assert device.trace.events == host.trace.events
    assert runner.num_asked > 0


def test_positions_come_along_only_where_tokens_are_doomed(choose: Choose) -> None:
    by_interval = DeviceRunner(choose)
    make_world(num_blocks=65, policy="h2o", runner=by_interval).generate(PROMPTS)
    assert by_interval.num_with_positions == 0 < by_interval.num_asked
    long_interval = DeviceRunner(choose)
    world = make_world(num_blocks=65, policy="h2o", runner=long_interval, interval=8)
    request = world.engine.submit(PROMPTS[0])
    while not world.engine.pool.tables or not world.engine.pool.tables["0"].num_doomed_tokens:
        world.engine.step()
    world.engine.step()  # one token over the budget again
    event = world.engine.scheduler.victims.choose(
        world.engine.pool.tables["0"], world.engine.scheduler._running["0"].occasion(under_pressure=True)
    )
    assert event is not None
    assert long_interval.num_with_positions == 1
    world.engine.abort(request)


def test_a_policy_that_is_no_ranking_is_asked_on_the_host(choose: Choose) -> None:
    world = make_world(policy="paged_eviction", runner=DeviceRunner(choose))
    with pytest.raises(AssertionError, match="no score is brought to the host"):
        world.engine.generate(PROMPTS)


ANSWERS: dict[str, Callable[[list[int]], list[int]]] = {
    "one too many": lambda victims: [*victims, victims[-1] + 1],
    "not ascending": lambda victims: victims[::-1],
    "twice": lambda victims: [victims[0], *victims[:-1]],
    "a sink": lambda victims: [0, *victims[1:]],
    "not computed": lambda victims: [*victims[:-1], 10**6],
}


@pytest.mark.parametrize("answer", ANSWERS.values(), ids=ANSWERS)
def test_a_wrong_answer_of_a_device_is_caught(choose: Choose, answer: Callable[[list[int]], list[int]]) -> None:
    runner = DeviceRunner(lambda *about: answer(choose(*about)))
    world = make_world(policy="h2o", runner=runner)
    with pytest.raises(InvariantError, match="device choice for request '0' at 20 computed tokens"):
        world.engine.generate(PROMPTS[:1])
    world.check_end()


def test_a_device_that_chooses_the_dead_is_caught(choose: Choose) -> None:
    chosen: list[list[int]] = []

    def again(*about: Any) -> list[int]:
        chosen.append(choose(*about))
        return chosen[0]

    world = make_world(policy="h2o", runner=DeviceRunner(again))
    with pytest.raises(InvariantError, match="device choice for request '0'"):
        world.engine.generate(PROMPTS[:1])
