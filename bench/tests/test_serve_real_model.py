"""``vtoken serve`` on SmolLM2-135M: text that a reader can judge, through the official client."""

import sys
from collections.abc import Callable

import pytest

from vtoken_bench.models import load_model, smollm2_folder
from vtoken_bench.soak.server import running_server

_FILLER = "The weather was fine, and nothing of note happened that day. " * 30
_QUESTION = "What is the capital of France? Answer in one sentence."


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # transformers' and the client's
def test_a_chat_that_lost_most_of_its_tokens_still_answers(need_smollm2: Callable[..., None]) -> None:
    need_smollm2("vllm")
    import openai

    folder = smollm2_folder()
    vtoken = [sys.executable, "-c", "from vtoken.cli import main; raise SystemExit(main())", "serve", str(folder)]
    settings = [
        *("--policy", "streaming_llm", "--kv-budget", "127", "--interval", "16", "--when", "always"),
        *("--served-model-name", "smollm2", "--dtype", "float32", "--enforce-eager", "--max-model-len", "1024"),
        *("--max-num-seqs", "4", "--block-size", "32", "--kv-cache-memory-bytes", str(100 << 20)),
    ]
    with running_server([*vtoken, *settings], {}) as server:
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=120)

        def say(text: str, **xargs: int) -> str:
            chunks = client.chat.completions.create(
                model="smollm2",
                messages=[{"role": "user", "content": text}],
                temperature=0,
                max_tokens=24,
                stream=True,
                extra_body={"vllm_xargs": xargs},
            )
            return "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)

        assert "Paris" in say(_FILLER + _QUESTION)
        assert server.metric("vtoken:evicted_tokens_total") > 200
        plain = say(_QUESTION, vtoken_off=1)
        assert server.end().exit_code == 0
    assert plain == _continued_by_transformers(_QUESTION, 24)


def _continued_by_transformers(text: str, max_tokens: int) -> str:
    model = load_model()
    ids = model.tokenizer.apply_chat_template(
        [{"role": "user", "content": text}], add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    output = model.model.generate(**ids, max_new_tokens=max_tokens, do_sample=False)
    return str(model.tokenizer.decode(output[0, ids["input_ids"].shape[1] :], skip_special_tokens=True))
