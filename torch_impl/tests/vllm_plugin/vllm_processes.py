"""A user's program: engine and workers in processes of their own, two tensor-parallel ranks. Prints JSON.

Arguments: model folder, file for the victim trace, prompts as JSON, settings of each prompt as JSON.
"""

import json
import os
import sys
import zlib
from typing import Any

CORES = sorted(os.sched_getaffinity(0))[:2]
os.environ |= {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
    "TORCHDYNAMO_DISABLE": "1",  # vLLM compiles its count of logprob ranks whatever enforce_eager says
    "VTOKEN_VLLM": "1",
    "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",  # functions of this file run in the workers
    "VLLM_CPU_OMP_THREADS_BIND": "|".join(map(str, CORES)),
}

import pytest  # noqa: E402
from vllm_world import engine_settings  # noqa: E402


def note_records(worker: Any) -> None:
    """Digests every record that this worker carries out."""
    side = worker.model_runner.vtoken
    begin_step, side.digest = side.begin_step, 0

    def noted(output: Any) -> Any:
        record = begin_step(output)
        carried = (record.src_slots, record.dst_slots, record.block_ids, record.num_evicted, record.recycles)
        side.digest = zlib.crc32(repr(carried).encode(), side.digest)
        return record

    side.begin_step = noted


def what_was_done(worker: Any) -> list[int]:
    side = worker.model_runner.vtoken
    return [side.digest, side.num_moved_tokens, side.num_recycled_tokens]


def main(model_dir: str, trace: str, prompts: str, settings: str) -> None:
    from vllm import LLM, SamplingParams
    from vllm.inputs import TokensPrompt

    vtoken = {
        "policy": "streaming_llm",
        "kv_budget": 64,
        "interval": 8,
        "when": "always",
        "record_trace": trace,
        "verify": True,
    }
    llm = LLM(model_dir, **engine_settings(vtoken, tensor_parallel_size=2))
    assert SamplingParams._verify_extra_args.__wrapped__.__module__ == "vllm.sampling_params", "wrapped once"
    with pytest.raises(ValueError, match="vtoken_budget='nonsense': give a number of tokens"):  # in this very process
        SamplingParams(extra_args={"vtoken_budget": "nonsense"})
    llm.collective_rpc(note_records)
    outputs = llm.generate(
        [TokensPrompt(prompt_token_ids=prompt) for prompt in json.loads(prompts)],
        [
            SamplingParams(temperature=0, max_tokens=60, ignore_eos=True, logprobs=0, extra_args=each)
            for each in json.loads(settings)
        ],
        use_tqdm=False,
    )
    said = [list(output.outputs[0].token_ids) for output in outputs]
    logprobs = [
        [ranks[token].logprob for token, ranks in zip(tokens, output.outputs[0].logprobs, strict=True)]
        for tokens, output in zip(said, outputs, strict=True)
    ]
    ranks = llm.collective_rpc(what_was_done)
    print(json.dumps({"said": said, "logprobs": logprobs, "ranks": ranks, "all_free": llm.reset_prefix_cache()}))


if __name__ == "__main__":
    main(*sys.argv[1:])
