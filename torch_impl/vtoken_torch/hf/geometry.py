"""What a model's attention looks like, found by a forward pass of three tokens, and which models are refused."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor
from transformers import Cache

from vtoken.errors import SpecError
from vtoken.executor import DType, KVSpec
from vtoken.plugins import first_line
from vtoken_torch.hf.attention import NAME

__all__ = ["Geometry", "check_config", "probe"]

_DTYPES: Final[dict[torch.dtype, DType]] = {
    torch.float32: "float32",
    torch.bfloat16: "bfloat16",
    torch.float16: "float16",
}
_TOKENS: Final = 3
_FULL: Final = "take a model whose layers all have full causal attention"
_EXTRAS: Final = {
    "softcap": "caps its logits",
    "s_aux": "has attention sinks as extra logits",
    "sinks": "has attention sinks as extra logits",
    "position_bias": "adds a bias by distance to its logits",
    "sliding_window": "has a sliding window",
}


@dataclass(frozen=True, slots=True)
class Geometry:
    """Shape of a model's KV: the same in all its layers."""

    num_layers: int
    num_kv_heads: int
    num_query_heads: int
    head_size: int
    dtype: DType
    max_positions: int

    def kv_spec(self, *, block_size: int, num_blocks: int, max_num_reqs: int) -> KVSpec:
        """A pool for this model."""
        return KVSpec(
            num_layers=self.num_layers,
            num_kv_heads=self.num_kv_heads,
            num_query_heads=self.num_query_heads,
            head_size=self.head_size,
            dtype=self.dtype,
            block_size=block_size,
            num_blocks=num_blocks,
            max_num_reqs=max_num_reqs,
        )

    def check_spec(self, spec: KVSpec) -> None:
        """Raises SpecError unless a pool of this shape is the model's."""
        for key in ("num_layers", "num_kv_heads", "num_query_heads", "head_size", "dtype"):
            if getattr(spec, key) != getattr(self, key):
                raise SpecError(f"{key}={getattr(spec, key)!r}: the model has {getattr(self, key)!r}")


def check_config(config: Any) -> None:
    """Refuses by name what cannot work: geometry that depends on the index, or is no causal attention over all KV.

    Raises:
        SpecError: names the model's type, the field and the remedy.
    """
    for fault in _faults(config, config.get_text_config()):
        raise SpecError(f"model type {config.model_type!r}: {fault}")


def _faults(config: Any, text: Any) -> Iterator[str]:
    if config.is_encoder_decoder:
        yield "an encoder and a decoder (is_encoder_decoder): take a decoder-only model"
    if not getattr(text, "is_causal", True):
        yield f"its attention is not causal (is_causal=False): {_FULL}"
    kinds = {*(getattr(text, "layer_types", None) or ()), *(getattr(text, "layers_block_type", None) or ())}
    others = sorted(kinds - {"full_attention", "attention"})
    if others and others != ["sliding_attention"]:
        yield f"layers of type {', '.join(others)} (layer_types): {_FULL}"
    window = getattr(text, "sliding_window", None)
    if others or (window is not None and getattr(text, "use_sliding_window", True)):
        yield (
            f"a sliding window of {window} tokens (sliding_window): {_FULL}, or, if nothing will be longer than the "
            "window, load it with sliding_window=None"
        )
    if getattr(text, "attention_chunk_size", None):
        yield f"attention in chunks of {text.attention_chunk_size} tokens (attention_chunk_size): {_FULL}"
    attention = getattr(text, "attn_config", None)
    if getattr(text, "alibi", False) or getattr(attention, "alibi", False) or text.model_type == "bloom":
        yield "ALiBi: its bias depends on the index of a key, not on its position: take a model with RoPE"
    if getattr(text, "kv_lora_rank", None):
        yield f"latent attention (MLA, kv_lora_rank={text.kv_lora_rank}): {_FULL} and keys and values of its own"
    for rope in _ropes(getattr(text, "rope_parameters", None) or {}):
        kind = rope.get("rope_type", "default")
        if kind in ("dynamic", "longrope"):
            yield f"RoPE of type {kind!r} changes with the longest request of a batch: take one of fixed frequencies"
        if "mrope_section" in rope:
            yield "positions of three axes (mrope_section): take a text model"


def _ropes(parameters: dict[str, Any]) -> list[dict[str, Any]]:
    """One set of RoPE parameters, or one for each kind of layer."""
    nested = [each for each in parameters.values() if isinstance(each, dict)]
    return nested or [parameters]


def probe(model: Any) -> Geometry:
    """Runs a few tokens through a model, watching what comes to its cache and its attention.

    Leaves the attention implementation at vToken's.

    Raises:
        SpecError: as ``check_config``, or the model does something that only shows when it runs.
    """
    config = model.config
    check_config(config)
    name = config.model_type
    if not getattr(model, "_supports_attention_backend", False):
        raise SpecError(
            f"model type {name!r}: its attention does not go through transformers' AttentionInterface: {_FULL}, of a "
            "family that transformers maintains with it (Llama, Mistral, Qwen)"
        )
    if model.dtype not in _DTYPES:
        raise SpecError(f"model type {name!r} in {model.dtype}: load it with dtype float32, bfloat16 or float16")
    watch = _Watch()
    before = config._attn_implementation
    model.set_attn_implementation(NAME)
    try:
        logits = _forward(model, watch)
        geometry = watch.geometry(model)
        if tuple(logits.shape[:2]) != (1, 1):
            raise SpecError("its forward ignores logits_to_keep: take a causal language model")
        return geometry
    except Exception as error:  # whatever a model raises when it meets another cache than its own
        model.set_attn_implementation(before)
        raise SpecError(f"model type {name!r}: {first_line(error)}") from error


@torch.inference_mode()
def _forward(model: Any, watch: "_Watch") -> Tensor:
    places = torch.arange(_TOKENS, device=model.device).unsqueeze(0)
    keep = torch.tensor([_TOKENS - 1], device=model.device)
    output = model(
        input_ids=torch.zeros_like(places),
        position_ids=places,
        past_key_values=watch,
        use_cache=True,
        logits_to_keep=keep,
        vtoken=watch,
    )
    logits: Tensor = output.logits
    return logits


class _Watch(Cache):  # type: ignore[misc]  # transformers is not followed by the type checker
    """A cache and an attention in one that only note what they are called with."""

    def __init__(self) -> None:
        super().__init__(layers=[])
        self.written: list[tuple[int, int]] = []  # (layer, num_kv_heads)
        self.attended: list[tuple[int, int, int, int]] = []  # (layer, num_query_heads, head size of Q and of V)

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        self.written.append((layer_idx, key_states.shape[1]))
        return key_states, value_states

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        return query_length, 0

    def attend(self, layer: int, query: Tensor, value: Tensor, scale: float, extras: dict[str, Any]) -> Tensor:
        for key, does in _EXTRAS.items():
            if extras.get(key) is not None:
                raise SpecError(f"its attention {does} ({key}): {_FULL} and none of that")
        self.attended.append((layer, query.shape[1], query.shape[-1], value.shape[-1]))
        return query.transpose(1, 2)

    def geometry(self, model: Any) -> Geometry:
        """What was seen; raises SpecError where the layers differ or some have no attention over KV of their own."""
        text = model.config.get_text_config()
        layers = list(range(text.num_hidden_layers))
        for what, seen in (
            ("write KV", [layer for layer, _ in self.written]),
            ("attend", [each[0] for each in self.attended]),
        ):
            if seen != layers:
                raise SpecError(f"of its {len(layers)} layers, {len(set(seen))} {what} through the cache: {_FULL}")
        shapes = {(kv[1], *queries[1:]) for kv, queries in zip(self.written, self.attended, strict=True)}
        if len(shapes) > 1:
            raise SpecError(f"its layers differ in heads or head size: {_FULL}, all of one shape")
        ((num_kv_heads, num_query_heads, head_size, value_size),) = shapes
        if head_size != value_size:
            raise SpecError(f"keys of {head_size} and values of {value_size} elements: {_FULL} and one head size")
        maximum = int(text.max_position_embeddings)
        return Geometry(len(layers), num_kv_heads, num_query_heads, head_size, _DTYPES[model.dtype], maximum)
