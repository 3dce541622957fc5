"""One run of a real vLLM with the plugin on a tiny random Llama: what its cache held at each step.

Runner V1 runs in this process, V2 in one of its own, since Triton's interpreter must be chosen before Triton is
imported. Heavy imports wait until a run is made.
"""

import logging
import os
import pickle
import subprocess
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

from vtoken.errors import SpecError
from vtoken.executor import KVSpec
from vtoken.trace import VictimTrace
from vtoken_conformance.vllm_run import Setting, VllmRun

__all__ = ["ENVIRONMENT", "prepare", "run_vllm"]

_BLOCK_SIZE = 32
_NUM_BLOCKS = 64
_VOCABULARY = 512
_SHAPE = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}

ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
}
"""One thread, no network, no chatter: for any vLLM that is measured or checked."""

_IN_PROCESS = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_USE_V2_MODEL_RUNNER": "0"}

# Prompt tokens, output tokens, settings: bulk evictions after chunks (moves), then one death a step (recycles).
_REQUESTS: tuple[tuple[int, int, dict[str, Any]], ...] = (
    (150, 60, {"vtoken_policy": "streaming_llm", "vtoken_budget": 70}),
    (90, 70, {"vtoken_policy": "random", "vtoken_budget": 40, "vtoken_recent": 8}),
    (33, 90, {"vtoken_policy": "random", "vtoken_budget": 63, "vtoken_recent": 8, "vtoken_seed": 3}),
    (120, 40, {"vtoken_policy": "sliding_window", "vtoken_budget": 50}),
)
_PREFIX_LEN = 70  # of requests that begin alike: two whole blocks
_HOLDER = (10, 60, {"vtoken_off": True})  # comes first then, and keeps the prefix
_MAX_NUM_REQS = len(_REQUESTS) + 1
_SETTINGS = {"policy": "streaming_llm", "kv_budget": 64, "interval": 8, "when": "always"}
_LAZY = {"mode": "lazy", "low_watermark": 1.0}  # evacuated though memory is ample


def prepare() -> None:
    """Settings of vLLM, and of torch's own log, that hold only if they are there before either is imported."""
    for key, value in {**ENVIRONMENT, **_IN_PROCESS}.items():
        os.environ.setdefault(key, value)
    logging.getLogger("vllm").setLevel(logging.ERROR)


def run_vllm(setting: Setting) -> VllmRun:
    """Makes the model, runs all requests on vLLM's CPU backend, and records every step."""
    if setting.runner == 2 and "TRITON_INTERPRET" not in os.environ:
        return _run_apart(setting)
    prepare()
    with TemporaryDirectory(prefix="vtoken-conformance-") as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # vLLM and what it imports warn at will
        if setting.runner == 2:
            _keep_triton()
        from vtoken_conformance.vllm_recorder import Recorder

        model, trace = Path(folder) / "model", Path(folder) / "victims.jsonl"
        _save_tiny_llama(model, setting.head_size)
        with _engine(model, setting, trace) as engine:
            recorder = Recorder(engine.engine_core.engine_core)
            _generate(engine, setting.is_shared)
        recorded = VictimTrace.load(trace)
    counts = recorder.num_moves, recorder.num_recycles, recorder.num_shared
    return VllmRun(setting, _spec(setting), tuple(recorder.passes), recorded, *counts)


def _run_apart(setting: Setting) -> VllmRun:
    """In a process of its own. Raises SpecError with the end of what it said if it fails."""
    with TemporaryDirectory(prefix="vtoken-conformance-") as folder:
        path = Path(folder) / "run"
        path.write_bytes(pickle.dumps(setting))
        environment = {**os.environ, "TRITON_INTERPRET": "1", "VLLM_USE_V2_MODEL_RUNNER": "1"}
        command = [sys.executable, "-m", __name__, str(path)]
        done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
        if done.returncode:
            raise SpecError(f"vLLM's runner V2 failed under Triton's interpreter:\n{done.stderr[-4000:]}")
        run: VllmRun = pickle.loads(path.read_bytes())
        return run


def _keep_triton() -> None:
    """vLLM, imported later, turns Triton off unless a backend is active; the interpreter needs none."""
    from triton import backends

    backends.backends["cpu"] = SimpleNamespace(driver=SimpleNamespace(is_active=lambda: True), compiler=None)


def _spec(setting: Setting) -> KVSpec:
    return KVSpec(
        num_layers=_SHAPE["num_hidden_layers"],
        num_kv_heads=_SHAPE["num_key_value_heads"],
        num_query_heads=_SHAPE["num_attention_heads"],
        head_size=setting.head_size,
        dtype=setting.dtype,
        block_size=_BLOCK_SIZE,
        num_blocks=_NUM_BLOCKS,
        max_num_reqs=_MAX_NUM_REQS,
    )


def _save_tiny_llama(folder: Path, head_size: int) -> None:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.utils import logging as transformers_logging

    config = LlamaConfig(
        vocab_size=_VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        max_position_embeddings=1024,
        tie_word_embeddings=False,
        head_dim=head_size,
        **_SHAPE,
    )
    transformers_logging.disable_progress_bar()
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(0)
        model = LlamaForCausalLM(config).float()
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.15)
    model.save_pretrained(folder)


@contextmanager
def _engine(model: Path, setting: Setting, trace: Path) -> Iterator[Any]:
    from vllm import LLM

    from vtoken_torch.vllm_plugin.compat import SCHEDULER, WORKER

    settings = {**_SETTINGS, **_LAZY} if setting.is_lazy else _SETTINGS
    engine = LLM(
        str(model),
        scheduler_cls=SCHEDULER,
        worker_cls=WORKER,
        additional_config={"vtoken": {**settings, "record_trace": str(trace), "metrics": False}},
        dtype=setting.dtype,
        block_size=_BLOCK_SIZE,
        num_gpu_blocks_override=_NUM_BLOCKS,
        kv_cache_memory_bytes=1 << 24,
        max_model_len=512,
        max_num_seqs=_MAX_NUM_REQS,
        max_num_batched_tokens=96,
        enable_prefix_caching=setting.is_shared,
        enforce_eager=True,
        skip_tokenizer_init=True,
        use_tqdm_on_load=False,
        seed=0,
    ).llm_engine
    try:
        yield engine
    finally:
        engine.engine_core.shutdown()


def _generate(engine: Any, is_shared: bool) -> None:
    from vllm import SamplingParams
    from vllm.inputs import TokensPrompt

    num_alike = _PREFIX_LEN if is_shared else 0
    for index, (own_len, num_tokens, extra_args) in enumerate((_HOLDER, *_REQUESTS) if is_shared else _REQUESTS):
        seeds = [0] * num_alike + [index] * own_len
        prompt = [3 + (seed * 101 + position * 37) % (_VOCABULARY - 3) for position, seed in enumerate(seeds)]
        params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True, extra_args=extra_args)
        engine.add_request(str(index), TokensPrompt(prompt_token_ids=prompt), params)
        if extra_args == _HOLDER[2]:
            engine.step()
    while engine.has_unfinished_requests():
        engine.step()


def _main(path: Path) -> None:
    path.write_bytes(pickle.dumps(run_vllm(pickle.loads(path.read_bytes()))))


if __name__ == "__main__":
    _main(Path(sys.argv[1]))
