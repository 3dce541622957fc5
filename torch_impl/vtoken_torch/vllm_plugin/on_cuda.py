"""What cannot work on a GPU, each with its remedy. Nothing of the plugin has run on one.

vLLM is imported inside the functions alone.
"""

from collections.abc import Iterable, Iterator
from typing import Any

from vtoken_torch.vllm_plugin.options import PluginOptions, usable_policy

__all__ = ["backend_refusals", "device_refusals", "mass_refusal"]

_BACKENDS = ("FlashAttentionImpl", "TritonAttentionImpl")


def device_refusals(options: PluginOptions, vllm_config: Any) -> Iterator[str]:
    """Of the settings of an engine on CUDA."""
    if not options.unproven_device:
        yield "device cuda, on which nothing of the plugin has run: use the CPU, or set unproven_device=true to try it"
    if options.verify:
        yield "verify=true on cuda, unproven there: leave it out"
    if options.is_lazy:
        yield "mode='lazy' on cuda, where dead slots have no kernel in the plugin yet: use mode='eager'"
    reason = mass_refusal(vllm_config)
    if reason is not None and usable_policy(options.config.policy).signals:
        yield f"policy={options.config.policy!r}: {reason}"


def mass_refusal(vllm_config: Any) -> str | None:
    """Why no policy that looks at attention can run; None if it can."""
    if vllm_config.device_config.device_type == "cpu":
        return None
    mode = vllm_config.compilation_config.cudagraph_mode
    if not mode.has_full_cudagraphs():
        return None
    return (
        f"full CUDA graphs (cudagraph_mode={mode.name}) replay attention without telling its mass: "
        "set cudagraph_mode to PIECEWISE, or use a policy without scores ('streaming_llm', 'random')"
    )


def backend_refusals(layers: Iterable[Any]) -> list[str]:
    """Of the attention modules of a model on a GPU."""
    names = {type(layer.impl).__name__ for layer in layers}
    others = sorted(name for name in names if not name.endswith(_BACKENDS))
    return [
        f"attention by {name}, unproven here: use attention backend FLASH_ATTN, TRITON_ATTN or CUSTOM"
        for name in others
    ]
