"""The engine's calls: generate, stream, abort, limits and refusals, over a toy model."""

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import pytest
from serving_world import PROMPTS, make_world, prompt_of

from vtoken.errors import SpecError
from vtoken.policies import Policy, RequestView, Signal
from vtoken.serving.protocol import SamplingParams
from vtoken.serving.requests import Progress


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
    says = "prompt 0 asks for 21 tokens in all, max_model_len is 20: shorten it, or raise max_model_len"
    with pytest.raises(SpecError, match=says):
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
