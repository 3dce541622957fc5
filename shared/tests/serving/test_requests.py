from hypothesis import given
from hypothesis import strategies as st

from vtoken.serving.protocol import SamplingParams
from vtoken.serving.requests import Progress, Request


def make_request(prompt_len: int = 5, max_tokens: int = 4, **fields: int) -> Request:
    return Request(
        0, tuple(range(prompt_len)), SamplingParams(max_tokens=max_tokens), **{"prefill_to": prompt_len, **fields}
    )


@given(st.integers(1, 9), st.integers(0, 9), st.integers(0, 18), st.integers(0, 18))
def test_tokens_are_those_of_prompt_and_output(prompt_len: int, num_output: int, start: int, length: int) -> None:
    request = make_request(prompt_len)
    request.output.extend(range(100, 100 + num_output))
    assert list(request.tokens(start, start + length)) == [*request.prompt, *request.output][start : start + length]


@given(st.integers(1, 40), st.integers(1, 12), st.integers(0, 39))
def test_chunks_end_at_the_same_counts_wherever_they_begin(prompt_len: int, chunk: int, computed: int) -> None:
    request = make_request(prompt_len, computed=min(computed, prompt_len - 1))
    end = request.computed + request.num_next(chunk)
    assert end == prompt_len or end % chunk == 0
    assert 1 <= request.num_next(chunk) <= chunk


def test_the_last_output_token_is_never_computed() -> None:
    assert make_request(5, 4).max_computed == 8
    assert make_request(5, 1).max_computed == 5


def test_a_restart_rebuilds_what_was_computed() -> None:
    request = make_request(5, 9, computed=8)
    request.output.extend([1, 2, 3, 4])
    request.restart()
    assert (request.computed, request.prefill_to, request.num_preemptions, request.num_next(16)) == (0, 8, 1, 8)
    request.computed = 3
    request.restart()  # again, before all was rebuilt
    assert (request.prefill_to, request.preempted_at, request.num_preemptions) == (8, 3, 2)


def test_a_request_ends_with_its_last_token_or_with_a_stop_token() -> None:
    request = Request(0, (1,), SamplingParams(max_tokens=2, stop_token_ids=(7,)), 1)
    request.take(3)
    assert request.finish_reason is None
    request.take(4)
    assert request.as_output().finish_reason == "length"
    request = Request(0, (1,), SamplingParams(max_tokens=1, stop_token_ids=(7,)), 1)
    request.take(7)
    assert (request.finish_reason, request.as_output().token_ids) == ("stop", (7,))


def test_progress_expects_nothing_more_of_what_has_ended() -> None:
    one, two = make_request(max_tokens=4), make_request(max_tokens=9)
    one.output, two.output = [1], [1, 2]
    assert Progress.of([one, two]) == Progress(0, 2, 3, 13)
    one.finish_reason = "stop"
    assert Progress.of([one, two]) == Progress(1, 2, 3, 10)
