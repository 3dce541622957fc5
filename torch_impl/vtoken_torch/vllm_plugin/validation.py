"""Requests that cannot run are refused where they are made: a ValueError offline, an HTTP 400 from the server.

The only methods of vLLM that are wrapped, and only in a process where vToken is on. Three, since no single one sees
everything in time:

    SamplingParams._verify_extra_args     a request is parsed: its settings
    InputProcessor                        start: settings that no class will read; later the length of each request
    AsyncLLM.generate                     the same length before a stream has begun, while HTTP can still say 400
"""

import functools
from collections.abc import Callable
from typing import Any

from vtoken.config import VTokenConfig
from vtoken.errors import SpecError
from vtoken_torch.vllm_plugin.capacity import Capacity
from vtoken_torch.vllm_plugin.compat import SCHEDULER, WORKER
from vtoken_torch.vllm_plugin.options import NAMESPACE, PluginOptions, request_config

__all__ = ["check_requests"]

_PLACEHOLDER = VTokenConfig(policy="streaming_llm", kv_budget=1)
_default = _PLACEHOLDER


def check_requests(default: VTokenConfig | None = None) -> None:
    """From now on bad settings, and requests that never fit their engine's pool, raise. Re-entrant.

    Args:
        default: the engine's configuration, which a request's changes must fit; None if this process knows none. The
            newest counts.
    """
    from vllm.sampling_params import SamplingParams
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.engine.input_processor import InputProcessor

    global _default
    _default = default or _default
    _wrap(SamplingParams, "_verify_extra_args", _with_checked_settings)
    _wrap(InputProcessor, "__init__", _with_checked_classes)
    _wrap(InputProcessor, "process_inputs", _with_checked_length)
    _wrap(AsyncLLM, "generate", _with_early_check)


def _wrap(owner: type, name: str, make: Callable[[Any], Any]) -> None:
    method = getattr(owner, name)
    if not hasattr(method, "vtoken"):
        wrapped: Any = functools.wraps(method)(make(method))
        wrapped.vtoken = True
        setattr(owner, name, wrapped)


def _with_checked_settings(verify: Any) -> Any:
    def verify_with_vtoken(self: Any) -> None:
        request_config(self.extra_args, _default)  # first, since it names the field
        verify(self)

    return verify_with_vtoken


def _with_checked_classes(init: Any) -> Any:
    def init_with_vtoken(self: Any, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        is_meant = PluginOptions.from_additional_config(vllm_config.additional_config) is not None
        if is_meant and vllm_config.scheduler_config.scheduler_cls is None:
            raise SpecError(
                f"additional_config[{NAMESPACE!r}] is given, but nothing reads it: set scheduler_cls={SCHEDULER!r} and "
                f"worker_cls={WORKER!r} too, or leave it out"
            )
        init(self, vllm_config, *args, **kwargs)

    return init_with_vtoken


def _with_checked_length(process_inputs: Any) -> Any:
    def process_with_vtoken(self: Any, *args: Any, **kwargs: Any) -> Any:
        request = process_inputs(self, *args, **kwargs)
        prompt = request.prompt_token_ids if request.prompt_token_ids is not None else request.prompt_embeds
        _check_length(self, prompt, request.sampling_params)
        return request

    return process_with_vtoken


def _with_early_check(generate: Any) -> Any:
    """A plain function: it checks when it is called, an asynchronous generator would when it is first awaited."""

    def generate_with_vtoken(self: Any, prompt: Any, sampling_params: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(prompt, dict):
            tokens = prompt.get("prompt_token_ids")
            _check_length(
                self.input_processor, prompt.get("prompt_embeds") if tokens is None else tokens, sampling_params
            )
        return generate(self, prompt, sampling_params, *args, **kwargs)

    return generate_with_vtoken


def _check_length(input_processor: Any, prompt: Any, sampling_params: Any) -> None:
    """``prompt``: token ids, or embeddings ``[num_tokens, hidden_size]``; None if it is still to be tokenized."""
    capacity = _capacity(input_processor)
    if capacity is not None and prompt is not None and sampling_params is not None:
        capacity.check(sampling_params.extra_args, len(prompt), sampling_params.max_tokens)


def _capacity(input_processor: Any) -> Capacity | None:
    """The capacity of a processor's engine, kept on it; None if vToken is off there, or the pool is not known yet."""
    kept: Capacity | None = getattr(input_processor, "vtoken_capacity", None)
    if kept is not None:
        return kept
    vllm_config = input_processor.vllm_config
    options = PluginOptions.from_additional_config(vllm_config.additional_config)
    num_blocks = vllm_config.cache_config.num_gpu_blocks
    if options is None or not num_blocks:
        return None
    capacity = Capacity.of(vllm_config, options, num_blocks // _num_engines(vllm_config.parallel_config))
    input_processor.vtoken_capacity = capacity
    return capacity


def _num_engines(parallel_config: Any) -> int:
    """Engines behind this process: vLLM adds their pools up, a request gets one of them."""
    if parallel_config.local_engines_only:
        return int(parallel_config.data_parallel_size_local)
    return int(parallel_config.data_parallel_size)
