"""The whole loop over a toy model: every output must be the oracle's, and every step must keep every invariant."""

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from serving_world import ToyRunner, make_world, prompt_of

from vtoken.errors import InvariantError, SpecError
from vtoken.policies import Policy, RequestView, Signal
from vtoken.serving.protocol import SamplingParams, StepRow
from vtoken.serving.requests import Progress
from vtoken.types import Move

POLICIES = (
    "streaming_llm",
    "sliding_window",
    "random",
    "h2o",
    "tova",
    "snapkv",
    "scissorhands",
    "paged_eviction",
    "none",
)
SCORE_FREE = ("streaming_llm", "sliding_window", "random")
VARIANTS: dict[str, dict[str, Any]] = {
    "eager": {},
    "eager, fill alone": {"recycle": False},
    "lazy": {"mode": "lazy", "low_watermark": 1.0, "cooldown_steps": 2},
    "naive": {"variant": "naive"},
    "native": {"variant": "native"},
}
PREFIX = prompt_of(13, seed=1)
PROMPTS = [prompt_of(20), PREFIX + prompt_of(4, seed=2), PREFIX + prompt_of(9, seed=3), [1, 2, 3], prompt_of(9, seed=4)]


def budget_of(policy: str) -> dict[str, Any]:
    return {"policy": policy, "kv_budget": None if policy == "none" else 16}


# -- everything at once ----------------------------------------------------------------------------------------------


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


# -- what runs beside it ---------------------------------------------------------------------------------------------


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


# -- the calls -------------------------------------------------------------------------------------------------------


def test_a_stream_gives_each_token_as_it_is_sampled() -> None:
    params = [SamplingParams(max_tokens=count) for count in (5, 2, 7)]
    outputs = make_world().engine.generate(PROMPTS[:3], params)
    world = make_world()
    streamed: dict[int, list[int]] = {0: [], 1: [], 2: []}
    for number, token_id in world.engine.stream(PROMPTS[:3], params):
        streamed[number].append(token_id)
        assert len(streamed[0]) <= len(world.reports)
    assert [tuple(tokens) for tokens in streamed.values()] == [output.token_ids for output in outputs]
    world.check_end()


def test_a_stream_that_is_closed_aborts_its_requests_and_no_other() -> None:
    world = make_world()
    other = world.engine.submit(prompt_of(9), SamplingParams(max_tokens=30))
    stream = world.engine.stream(PROMPTS)
    next(stream)
    stream.close()
    assert [request.index for request in world.engine.batch.running] == [other.index]
    while not world.engine.is_idle:
        world.engine.step()
    world.check_end()
    world.check_outputs([other.prompt], [other.sampling], [other.as_output()])


def test_streams_and_generate_share_the_engine() -> None:
    world = make_world()
    stream = world.engine.stream([PROMPTS[0]], SamplingParams(max_tokens=9))
    first = next(stream)
    (output,) = world.engine.generate([PROMPTS[4]], SamplingParams(max_tokens=5))
    tokens = [first, *stream]
    assert [number for number, _ in tokens] == [0] * 9
    assert len(output.token_ids) == 5
    world.check_end()


def test_progress_ends_with_everything_done() -> None:
    seen: list[Progress] = []
    make_world().engine.generate(PROMPTS, SamplingParams(max_tokens=6), on_progress=seen.append)
    assert seen[-1] == Progress(num_finished=5, num_requests=5, num_output_tokens=30, max_output_tokens=30)
    assert all(one.num_output_tokens <= two.num_output_tokens for one, two in pairwise(seen))


def test_what_interrupts_a_generate_leaves_nothing_behind() -> None:
    def stop(progress: Progress) -> None:
        if progress.num_output_tokens > 3:
            raise KeyboardInterrupt

    world = make_world()
    with pytest.raises(KeyboardInterrupt):
        world.engine.generate(PROMPTS, on_progress=stop)
    world.check_end()


def test_a_request_is_aborted_wherever_it_is_and_only_once() -> None:
    world = make_world(max_num_reqs=1)
    running, waiting, ended = (
        world.engine.submit(prompt_of(9, seed), SamplingParams(max_tokens=3)) for seed in range(3)
    )
    world.engine.step()
    for request in (running, waiting, running):
        world.engine.abort(request)
    assert (running.finish_reason, waiting.finish_reason) == ("abort", "abort")
    while not world.engine.is_idle:
        world.engine.step()
    world.engine.abort(ended)
    assert ended.finish_reason == "length"
    world.check_end()


def test_a_stop_token_ends_a_request_and_is_part_of_its_output() -> None:
    (free,) = make_world().generate([PROMPTS[0]])
    (stopped,) = make_world().generate([PROMPTS[0]], SamplingParams(max_tokens=24, stop_token_ids=(free.token_ids[6],)))
    assert stopped.finish_reason == "stop"
    assert stopped.token_ids == free.token_ids[: free.token_ids.index(free.token_ids[6]) + 1]


REFUSED: dict[str, tuple[Callable[[Any], object], str]] = {
    "empty": (lambda engine: engine.generate([[1], []]), "prompt 1 is empty: give at least 1 token"),
    "text": (lambda engine: engine.generate(["tell me"]), "prompt 0 is 'tell me': give token ids, whole numbers"),
    "fractions": (lambda engine: engine.generate([[0.5]]), r"prompt 0 is \[0.5\]: give token ids"),
    "negative": (lambda engine: engine.generate([[1, -2]]), "prompt 0 has token ids -2 to 1: give ids of at least 0"),
    "sampling": (lambda engine: engine.generate([[1]], []), "0 sampling parameters for 1 prompts"),
    "stream": (lambda engine: next(engine.stream([[]])), "prompt 0 is empty"),
    "never fits": (
        lambda engine: engine.generate([[1], [2] * 400]),
        "prompt 1: the request needs 116 blocks at its worst, the pool has 32",
    ),
}


@pytest.mark.parametrize(("call", "message"), REFUSED.values(), ids=REFUSED)
def test_a_bad_prompt_is_refused_and_starts_and_hurts_nobody(call: Callable[[Any], object], message: str) -> None:
    world = make_world(policy="none", kv_budget=None)
    other = world.engine.submit(PROMPTS[0], SamplingParams(max_tokens=5))
    world.engine.step()
    with pytest.raises(SpecError, match=message):
        call(world.engine)
    assert not world.engine.batch.waiting
    while not world.engine.is_idle:
        world.engine.step()
    assert other.finish_reason == "length"
    world.check_end()


def test_the_models_limits_are_the_prompts() -> None:
    engine = make_world().engine
    engine.max_model_len, engine.vocab_size = 20, 50
    with pytest.raises(SpecError, match="prompt 0 asks for 21 tokens in all, the model has 20: shorten it"):
        engine.submit([1] * 15, SamplingParams(max_tokens=6))
    with pytest.raises(SpecError, match="prompt 0 has token ids 3 to 50: give ids of at least 0, below vocab_size=50"):
        engine.submit([3, 50], SamplingParams(max_tokens=6))
    engine.submit([3, 49], SamplingParams(max_tokens=18))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"chunk_tokens": 0}, "chunk_tokens=0: give at least 1"),
        ({"policy": "nobody"}, "nobody"),
        ({"max_num_seqs": 5}, "max_num_seqs=5: give 1 to max_num_reqs=4"),
    ],
)
def test_options_are_checked(options: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        make_world(**options)


def test_a_policy_that_needs_keys_is_refused() -> None:
    class Keys(Policy):
        name = "keys"
        signals = frozenset({Signal.KEY_NORM})

        def select_victims(self, view: RequestView) -> Sequence[int]:
            return ()

    with pytest.raises(SpecError, match="policy 'keys' needs key_norm: this engine collects mass alone"):
        make_world(policy_object=Keys())


# -- what breaks -----------------------------------------------------------------------------------------------------


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
