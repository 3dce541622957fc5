"""A user's program: engines and workers in processes of their own, two tensor-parallel ranks. Prints JSON.

Arguments: model folder, file for the victim trace, batches as JSON: each a name and its requests (prompt, tokens to
say, settings). The batch ``lazy`` has an engine of its own; before the batch ``broken`` the second rank's copies break.
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

ENGINE = {"policy": "streaming_llm", "kv_budget": 64, "interval": 8, "when": "always", "verify": True}


def note_records(worker: Any) -> None:
    """Digests every record that this worker carries out, and keeps what it is told of each request's tokens."""
    side = worker.model_runner.vtoken
    begin_step, side.digest, side.told = side.begin_step, 0, []

    def noted(output: Any) -> Any:
        record = begin_step(output)
        carried = (record.src_slots, record.dst_slots, record.block_ids, record.num_evicted, record.recycles)
        side.digest = zlib.crc32(repr((carried, record.live_words)).encode(), side.digest)
        for req_id, made in record.verify.requests.items():
            key = int(req_id.partition("-")[0])
            side.told.append((key, made.is_start, made.first_new, made.first_new + len(made.new_slots), made.dead))
        return record

    side.begin_step = noted


def what_was_done(worker: Any) -> dict[str, Any]:
    side = worker.model_runner.vtoken
    done = {"digest": side.digest, "moved": side.num_moved_tokens, "recycled": side.num_recycled_tokens}
    return {**done, "told": side.told}


def break_the_second_rank(worker: Any) -> None:
    """Its copies lose a token from now on."""
    mover = worker.model_runner.vtoken.mover
    if worker.rank == 1:
        move = mover.move
        mover.move = lambda src, dst: move(src[1:], dst[1:])


def run(llm: Any, requests: list[tuple[list[int], int, dict[str, Any]]]) -> dict[str, Any]:
    from vllm import SamplingParams
    from vllm.inputs import TokensPrompt

    outputs = llm.generate(
        [TokensPrompt(prompt_token_ids=prompt) for prompt, *_ in requests],
        [
            SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, logprobs=0, extra_args=settings)
            for _, max_tokens, settings in requests
        ],
        use_tqdm=False,
    )
    ends = [output.outputs[0] for output in outputs]
    return {
        "keys": [int(output.request_id) for output in outputs],
        "said": [list(end.token_ids) for end in ends],
        "logprobs": [
            [ranks[token].logprob for token, ranks in zip(end.token_ids, end.logprobs, strict=True)] for end in ends
        ],
        "ends": [(end.finish_reason, end.stop_reason) for end in ends],
    }


def main(model_dir: str, trace: str, batches: str) -> None:
    from vllm import LLM, SamplingParams

    given, report = json.loads(batches), {}
    for name, more in (("eager", {"record_trace": trace}), ("lazy", {"mode": "lazy", "low_watermark": 1.0})):
        llm = LLM(model_dir, **engine_settings({**ENGINE, **more}, tensor_parallel_size=2))
        with pytest.raises(ValueError, match="vtoken_budget='nonsense': give a whole number"):  # in this very process
            SamplingParams(extra_args={"vtoken_budget": "nonsense"})
        llm.collective_rpc(note_records)
        for batch in [batch for batch in given if (batch == "lazy") == (name == "lazy")]:
            if batch == "broken":
                llm.collective_rpc(break_the_second_rank)
            report[batch] = run(llm, given[batch])
            report[batch]["ranks"] = llm.collective_rpc(what_was_done)
            report[batch]["all_free"] = llm.reset_prefix_cache()
        llm.llm_engine.engine_core.shutdown()
    assert SamplingParams._verify_extra_args.__wrapped__.__module__ == "vllm.sampling_params", "wrapped once"
    print(json.dumps(report))


if __name__ == "__main__":
    main(*sys.argv[1:])
