"""The OpenAI server under ``vtoken serve``, with the official client: one server with two front ends for all checks."""

import contextlib
import shutil
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from vllm_metrics import SERVE, check_metrics, files_of_ours, temporary_folder
from vllm_server import Server, add_tokenizer

from vtoken.cli import main

SETTINGS = {"policy": "random", "kv_budget": 60, "interval": 8, "when": "always"}
MODEL, NUM_TOKENS = "tiny", 24
CHUNK = 2048  # all prompts at once: where a prompt is cut, and so what is evicted, must not depend on when it arrives
PER_REQUEST: tuple[dict[str, Any], ...] = (  # every flat name once, and none
    {},
    {"vtoken_budget": 40},
    {"vtoken_ratio": 0.5},
    {"vtoken_policy": "streaming_llm"},
    {"vtoken_sinks": 0},
    {"vtoken_recent": 20},
    {"vtoken_seed": 5},
    {"vtoken_protect": [0, 20, 30, 34]},
    {"vtoken_protect_prompt": 1},
    {"vtoken_off": True},
)
AS_TEXT = (  # what the client would not send
    ('{"vtoken_ratio": NaN}', "vtoken_ratio=nan: give a share between 0 and 1"),
    ('{"vtoken_budget": true}', "vtoken_budget=1: give a whole number of tokens of at least 2"),
    ('{"vtoken_seed": 1000000000000000000000}', "vtoken_seed=1000000000000000000000: give integers below 2**63"),
    ('{"vtoken_budget": null}', "vtoken_budget"),
)
BAD: tuple[tuple[dict[str, Any], str], ...] = (
    ({"vtoken_budget": -3}, "vtoken_budget=-3: give a whole number of tokens of at least 2"),
    ({"vtoken_ratio": 1.5}, "vtoken_ratio=1.5: give a share between 0 and 1"),
    ({"vtoken_policy": "streming_llm"}, "did you mean 'streaming_llm'"),
    ({"vtoken_sinks": -1}, "vtoken_sinks=-1: give an integer of at least 0"),
    ({"vtoken_recent": "all"}, "vtoken_recent='all': give an integer of at least 0"),
    ({"vtoken_seed": 0.5}, "vtoken_seed=0.5: give an integer of at least 0"),
    ({"vtoken_protect": [-1, 4]}, "vtoken_protect=[-1, 4]: give [a0, b0, a1, b1, ...]"),
    ({"vtoken_protect": [0, 20, 30]}, "vtoken_protect=[0, 20, 30]: give [a0, b0, a1, b1, ...]"),
    ({"vtoken_protect_prompt": 2}, "vtoken_protect_prompt=2: give true or false"),
    ({"vtoken_off": "yes"}, "vtoken_off='yes': give true or false"),
    ({"vtoken_budged": 3}, "vtoken_budged=3: unknown option, did you mean 'vtoken_budget'"),
)


@pytest.fixture(scope="module")
def model(tiny_llama: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny Llama with a tokenizer and a chat template."""
    folder = tmp_path_factory.mktemp("server") / "tiny"
    shutil.copytree(tiny_llama, folder)
    add_tokenizer(folder)
    return folder


class Client:
    """The official client, and the few requests that the checks repeat."""

    def __init__(self, url: str) -> None:
        import openai

        self.api = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60)

    def complete(self, prompt: Any, **more: Any) -> Any:
        body = {"vllm_xargs": more.pop("xargs", {}), "return_token_ids": True, "ignore_eos": True}
        settings = {"model": MODEL, "max_tokens": NUM_TOKENS, "temperature": 0, "extra_body": body, **more}
        return self.api.completions.create(prompt=prompt, **settings)

    def chat(self, text: str, **more: Any) -> Any:
        body = {"vllm_xargs": more.pop("xargs", {}), "return_token_ids": True, "ignore_eos": True}
        settings = {"model": MODEL, "max_tokens": NUM_TOKENS, "temperature": 0, "extra_body": body, **more}
        return self.api.chat.completions.create(messages=[{"role": "user", "content": text}], **settings)


@pytest.mark.slow
def test_server(
    world: Callable[..., Any],
    reference: Any,
    tokens: Callable[[int], list[int]],
    model: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    subtests: pytest.Subtests,
) -> None:
    outcomes = engine_outcomes(world, reference, tokens)
    with temporary_folder() as temporary:
        check_server(outcomes, model, tmp_path / "log", capsys, subtests)
        assert files_of_ours(temporary) == []


def check_server(
    outcomes: list[Any], model: Path, log: Path, capsys: pytest.CaptureFixture[str], subtests: pytest.Subtests
) -> None:
    more = ("--max-num-batched-tokens", str(CHUNK), "--max-model-len", "4096", "--api-server-count", "2")
    server = Server(log, str(model), *SERVE, *more)
    client = Client(server.url)
    try:
        with subtests.test("its /metrics, before, during and after requests"):
            check_metrics(server)
            assert main(["stats", server.url]) == 0
            assert "evicted tokens" in capsys.readouterr().out
        with subtests.test("its tokens are the engine's, which are the reference's, for every setting of a request"):
            check_tokens(client, outcomes)
        with subtests.test("text, streamed and whole"):
            check_text(client)
        with subtests.test("bad settings are a 400 that names field, value and remedy; the server lives on"):
            check_refusals(client)
        with subtests.test("what never fits is a 400, a prompt longer than the pool runs"):
            check_what_fits(client)
        with subtests.test("who hangs up gives the blocks back"):
            check_disconnects(client, server)
        with subtests.test("its log has the start line"):
            assert "vToken: policy=random, kv_budget=60, interval=8, " in server.log()
        with subtests.test("SIGTERM ends it and all its processes"):
            said = server.log()
            assert "Traceback" not in said
            assert server.stop() == (0, [])
            last_words = server.log()[len(said) :]  # of two servers, vLLM kills one within a second, with its traceback
            assert "/vtoken_torch/" not in last_words
    finally:
        client.api.close()
        server.kill()


def engine_outcomes(world: Callable[..., Any], reference: Any, tokens: Callable[[int], list[int]]) -> list[Any]:
    """What the engine says in this process, for each of ``PER_REQUEST``; it is what the masked reference says."""
    from vllm_reference import Epoch

    with world(SETTINGS, max_num_batched_tokens=CHUNK) as engine:
        for index, extra in enumerate(PER_REQUEST):
            length = 50 if "vtoken_protect_prompt" in extra else 90 + 7 * index
            engine.submit(tokens(length), NUM_TOKENS, **extra)
        engine.run()
        engine.assert_exact(reference)
        outcomes = list(engine.outcomes.values())
    assert all(outcome.epochs[0].deaths for outcome in outcomes[:-1]), "every setting but vtoken_off evicts"
    plain = outcomes[-1]
    greedy = reference.expected(plain.prompt + plain.tokens, len(plain.prompt), [Epoch()])
    assert [token for token, _ in greedy] == plain.tokens, "vtoken_off is plain vLLM"
    return outcomes


def check_tokens(client: Client, outcomes: list[Any]) -> None:
    def ask(case: tuple[Any, dict[str, Any]]) -> Any:
        return client.complete(case[0].prompt, xargs=case[1], logprobs=1).choices[0]

    with ThreadPoolExecutor(len(outcomes)) as threads:
        choices = list(threads.map(ask, zip(outcomes, PER_REQUEST, strict=True)))
    for choice, outcome, extra in zip(choices, outcomes, PER_REQUEST, strict=True):
        assert choice.token_ids == outcome.tokens, extra
        assert choice.logprobs.token_logprobs == pytest.approx(outcome.logprobs, abs=1e-4), extra


def check_text(client: Client) -> None:
    text = "the quick brown fox jumps over the lazy dog, and then over the next one too; what does it do after that?"
    whole = client.complete(text).choices[0]
    assert len(whole.token_ids) == NUM_TOKENS
    assert whole.text
    chunks = list(client.complete(text, stream=True, stream_options={"include_usage": True}))
    assert "".join(chunk.choices[0].text for chunk in chunks if chunk.choices) == whole.text
    assert chunks[-1].usage.completion_tokens == NUM_TOKENS
    chat = client.chat(text, logprobs=True, top_logprobs=2).choices[0]
    assert chat.message.content
    for entry in chat.logprobs.content:
        assert entry.logprob == max(top.logprob for top in entry.top_logprobs)
    assert len(chat.logprobs.content) == NUM_TOKENS
    deltas = [chunk.choices[0].delta.content or "" for chunk in client.chat(text, stream=True) if chunk.choices]
    assert "".join(deltas) == chat.message.content
    off = {"vtoken_off": 1}
    plain = client.chat(text, xargs=off).choices[0].message.content
    assert plain != chat.message.content
    settings = {"model": MODEL, "input": text, "max_output_tokens": NUM_TOKENS, "temperature": 0}
    answer = client.api.responses.create(**settings, extra_body={"vllm_xargs": off}).output_text
    assert answer
    assert plain.startswith(answer)


def check_refusals(client: Client) -> None:
    import openai

    def refusal(ask: Callable[..., Any], xargs: dict[str, Any], stream: bool) -> str:
        with pytest.raises(openai.BadRequestError) as refused:
            list(ask("hello", xargs=xargs, stream=stream))
        assert refused.value.status_code == 400
        return str(refused.value)

    for text, message in AS_TEXT:
        for stream in ("false", "true"):
            body = f'{{"model": "{MODEL}", "prompt": "hello", "stream": {stream}, "vllm_xargs": {text}}}'
            answer = client.api._client.post("completions", content=body, headers={"Content-Type": "application/json"})
            assert (answer.status_code, message in answer.text) == (400, True), (text, answer.text)
    for xargs, message in BAD:
        for ask in (client.complete, client.chat):
            for stream in (False, True):
                assert message in refusal(ask, xargs, stream), (xargs, stream)
    bad, message = BAD[0]
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError, match=message):
            client.api.responses.create(model=MODEL, input="hello", stream=stream, extra_body={"vllm_xargs": bad})
    burst = BAD * 20
    with ThreadPoolExecutor(8) as threads:
        refusals = list(threads.map(lambda case: refusal(client.complete, case[0], False), burst))
    assert all(message in text for text, (_, message) in zip(refusals, burst, strict=True))
    assert len(client.complete("hello").choices[0].token_ids) == NUM_TOKENS


def check_what_fits(client: Client) -> None:
    import openai

    off, prompt = {"vtoken_off": 1}, [5 + index % 400 for index in range(2100)]  # the pool has 64 blocks of 32 tokens
    for stream in (False, True) * 4:  # the kernel spreads them over both front ends
        for ask in (
            lambda stream: client.complete(prompt[:300], xargs=off, max_tokens=2000, stream=stream),
            lambda stream: client.chat("long " * 70, xargs=off, max_tokens=None, stream=stream),  # up to max_model_len
        ):
            with pytest.raises(openai.BadRequestError) as caught:
                ask(stream)
            assert caught.value.status_code == 400
            assert "blocks at its worst, the pool has 64: lower its budget" in str(caught.value)
    assert client.complete(prompt, max_tokens=30).usage.completion_tokens == 30


def check_disconnects(client: Client, server: Server) -> None:
    def hang_up(number: int) -> None:
        if number % 2:
            with client.complete([3 + number] * 100, max_tokens=400, stream=True) as stream:
                next(iter(stream))
        else:
            import openai

            with contextlib.suppress(openai.APITimeoutError):
                client.complete([3 + number] * 100, max_tokens=400, timeout=0.3)

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(hang_up, range(16)))
    end = time.monotonic() + 60
    while server.metric("vllm:num_requests_running") + server.metric("vllm:num_requests_waiting"):
        assert time.monotonic() < end, "requests of clients that are gone still run"
        time.sleep(0.1)
    client.complete("hello")  # a gauge holds what the last step said
    assert server.metric("vllm:kv_cache_usage_perc") == 0
