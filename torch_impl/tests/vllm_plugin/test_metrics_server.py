"""``/metrics`` of two engines (data parallelism) behind two API servers. One engine's: where its servers are tested."""

import json
import shutil
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import pytest
from vllm_metrics import BUDGET, NUM_BLOCKS, SERVE, engines, family_of, files_of_ours, kill_all, temporary_folder
from vllm_server import Server, add_tokenizer


@pytest.mark.slow
def test_two_engines_behind_two_servers_and_what_is_left_when_all_are_killed(world, reference, tiny_llama, tmp_path):
    """Data parallelism. What SIGKILL leaves lies in the folder of Prometheus, which plain vLLM leaves too."""
    settings = {"policy": "random", "kv_budget": BUDGET, "interval": 8, "when": "always"}
    with world(settings, max_num_batched_tokens=2048) as alone:
        (expected,) = alone.generate([[9] * 100], 60)
        alone.assert_exact(reference)
    model = tmp_path / "tiny"
    shutil.copytree(tiny_llama, model)
    add_tokenizer(model)
    with temporary_folder() as temporary:
        server = Server(tmp_path / "log", str(model), *SERVE, "--data-parallel-size", "2", "--api-server-count", "2")
        family = family_of(server)
        try:
            check_both_engines(server, expected)
        finally:
            kill_all(server, family)
        left = files_of_ours(temporary)
    assert len({path.parent for path in left}) == 1, left
    assert all(path.suffix == ".db" and "vtoken" not in path.name for path in left), left


def check_both_engines(server, expected):
    with ThreadPoolExecutor(8) as threads:
        said = list(threads.map(lambda _: tokens_of(server), range(16)))
    assert all(tokens == expected for tokens in said)
    found = engines(server)
    assert [each.engine for each in found] == ["0", "1"]
    assert all(each.values["pool_blocks"] == NUM_BLOCKS for each in found)
    assert all(each.values["evicted_tokens"] > 0 for each in found), "an engine had nothing to do"


def tokens_of(server: Server) -> list[int]:
    """One whole completion, as token ids."""
    body = {"model": "tiny", "prompt": [9] * 100, "max_tokens": 60, "temperature": 0, "ignore_eos": True}
    request = urllib.request.Request(
        f"{server.url}/v1/completions",
        json.dumps({**body, "return_token_ids": True}).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=300) as answer:
        tokens: list[int] = json.load(answer)["choices"][0]["token_ids"]
    return tokens
