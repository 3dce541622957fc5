"""Steps that fail end their requests alone; runners and engines that are broken on purpose are caught."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
from serving_world import PROMPTS, VARIANTS, ToyRunner, make_world, prompt_of

from vtoken.errors import InvariantError, SpecError
from vtoken.serving.protocol import SamplingParams, StepRow
from vtoken.types import Move


class FaultyRunner(ToyRunner):
    """Raises, or answers too much, once in its third step."""

    def __init__(self, answer: Callable[[list[int]], list[int]]) -> None:
        super().__init__()
        self.answer, self.num_steps = answer, 0

    def step(self, rows: Sequence[StepRow]) -> list[int]:
        self.num_steps += 1
        tokens = super().step(rows)
        return self.answer(tokens) if self.num_steps == 3 else tokens


def out_of_memory(tokens: list[int]) -> list[int]:
    raise MemoryError("the device is full")


@pytest.mark.parametrize(
    ("answer", "error"),
    [(out_of_memory, MemoryError), (lambda tokens: [*tokens, 1], InvariantError), (lambda tokens: [], InvariantError)],
)
def test_a_step_that_fails_ends_those_that_ran_and_the_engine_goes_on(answer: Any, error: type[Exception]) -> None:
    world = make_world(max_num_reqs=2, runner=FaultyRunner(answer))
    first, second, third = (world.engine.submit(prompt_of(8, seed), SamplingParams(max_tokens=9)) for seed in range(3))
    world.engine.step()
    world.engine.step()
    with pytest.raises(error):
        world.engine.step()
    assert (first.finish_reason, second.finish_reason, third.finish_reason) == ("error", "error", None)
    while not world.engine.is_idle:
        world.engine.step()
    world.check_end()
    requests = (first, second, third)
    world.check_outputs(
        [each.prompt for each in requests],
        [each.sampling for each in requests],
        [each.as_output() for each in requests],
    )
    assert third.finish_reason == "length"


class ForgetsMoves(ToyRunner):
    """Its store loses the bytes of a move."""

    def make_store(self, spec: Any) -> Any:
        store = super().make_store(spec)
        store.move = lambda moves: None  # type: ignore[method-assign]
        return store


class SeesTheDead(ToyRunner):
    """Attends over whole blocks."""

    def visible(self, row: int, query: int) -> list[tuple[int, int]]:
        store, size = self.store, self.store.spec.block_size
        slots = [block * size + offset for block in store.block_table[row] for offset in range(size)]
        return [(store.positions[slot], int.from_bytes(store.kv[slot], "big")) for slot in slots if store.kv[slot]]


class WritesBeside(ToyRunner):
    """Puts a recycled token where an append would have put it."""

    def step(self, rows: Sequence[StepRow]) -> list[int]:
        return super().step([self.shifted(row) for row in rows])

    def shifted(self, row: StepRow) -> StepRow:
        return StepRow(row.row, row.token_ids, row.start + 1, row.slots, row.sampling, row.num_sampled)


@pytest.mark.parametrize("runner", [ForgetsMoves, SeesTheDead, WritesBeside])
def test_a_broken_runner_is_caught(runner: type[ToyRunner]) -> None:
    for options in VARIANTS.values():
        world = make_world(num_blocks=18, policy="random", runner=runner(), **options)
        if runner is ForgetsMoves and options.get("variant"):
            continue  # it moves nothing
        with pytest.raises(AssertionError):
            world.generate(PROMPTS)


def test_a_broken_engine_is_caught() -> None:
    """Slots taken one request after another, with plans in between, would move tokens that are not written yet."""

    def reserve_then_plan(engine: Any) -> None:
        row, moved = engine._row, engine.scheduler.reclaim

        def late(request: Any) -> StepRow:
            made: StepRow = row(request)
            engine.pool.kill(request.req_id, [request.computed - 2])
            moved(request.req_id, force=True)
            return made

        engine._row = late

    world = make_world(policy="random")
    reserve_then_plan(world.engine)
    with pytest.raises((AssertionError, InvariantError, SpecError)):
        world.generate(PROMPTS)


def test_a_move_names_its_slots_as_the_store_has_them() -> None:
    """The plans that the observer is shown are those that the store was told of."""
    told: list[Move] = []
    world = make_world(policy="random", num_blocks=18)
    store = world.runner.store
    move = store.move
    store.move = lambda moves: (told.extend(moves), move(moves))  # type: ignore[method-assign]
    world.generate(PROMPTS)
    shown = [each for report in world.reports for plan in report.plans for each in plan.moves]
    assert shown == told
    assert len(told) == world.engine.counters.num_moved_tokens > 0
