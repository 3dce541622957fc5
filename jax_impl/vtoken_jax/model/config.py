"""The shape of a Llama-family model, read from the ``config.json`` of a Hugging Face folder."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vtoken.errors import SpecError
from vtoken.executor import DType, KVSpec

__all__ = ["FAMILIES", "ModelConfig", "RopeScaling", "read_eos_token_ids"]

FAMILIES = ("llama", "mistral", "qwen2")
"""Values of ``model_type`` that this decoder computes."""

_ROPE_TYPES = ("default", "linear", "llama3")


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """How rotary frequencies are stretched.

    ``linear`` divides all of them by ``factor``. ``llama3`` (Llama 3.1) divides those whose wavelength exceeds
    ``original_positions / low_freq_factor``, keeps those below ``original_positions / high_freq_factor``, and blends in
    between.
    """

    kind: str
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 1.0
    original_positions: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Everything that a compiled forward depends on; hashable, so that engines of one shape share what is compiled."""

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_query_heads: int
    num_kv_heads: int
    head_size: int
    max_positions: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: RopeScaling | None = None
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    tied_embeddings: bool = False

    def kv_spec(self, *, dtype: DType, block_size: int, num_blocks: int, max_num_reqs: int) -> KVSpec:
        """The pool that fits this model."""
        return KVSpec(
            num_layers=self.num_layers,
            num_kv_heads=self.num_kv_heads,
            num_query_heads=self.num_query_heads,
            head_size=self.head_size,
            dtype=dtype,
            block_size=block_size,
            num_blocks=num_blocks,
            max_num_reqs=max_num_reqs,
        )

    def check_spec(self, spec: KVSpec) -> None:
        """Raises SpecError unless the pool's tokens are this model's."""
        for key in ("num_layers", "num_kv_heads", "num_query_heads", "head_size"):
            if getattr(spec, key) != getattr(self, key):
                raise SpecError(f"the pool has {key}={getattr(spec, key)}, the model {getattr(self, key)}: use kv_spec")

    @classmethod
    def from_folder(cls, folder: Path) -> "ModelConfig":
        """Reads ``config.json``. Raises SpecError if there is none, and for what this decoder does not compute."""
        config = _read_json(folder, "config.json")
        try:
            return cls.from_mapping(config)
        except SpecError as error:
            raise SpecError(f"{folder / 'config.json'}: {error}") from None

    @classmethod
    def from_mapping(cls, config: Mapping[str, Any]) -> "ModelConfig":
        """The same from the parsed file; both spellings of the rotary parameters are read (transformers 4 and 5)."""
        try:
            return cls._from_mapping(config)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            if isinstance(error, SpecError):
                raise
            raise SpecError(f"no configuration of a Llama-family model: {error!r}: save the model again") from None

    @classmethod
    def _from_mapping(cls, config: Mapping[str, Any]) -> "ModelConfig":
        _check_supported(config)
        family, heads = config["model_type"], int(config["num_attention_heads"])
        theta, scaling = _rope(config)
        return cls(
            family=family,
            vocab_size=int(config["vocab_size"]),
            hidden_size=int(config["hidden_size"]),
            intermediate_size=int(config["intermediate_size"]),
            num_layers=int(config["num_hidden_layers"]),
            num_query_heads=heads,
            num_kv_heads=int(config.get("num_key_value_heads") or heads),
            head_size=int(config.get("head_dim") or config["hidden_size"] // heads),
            max_positions=int(config["max_position_embeddings"]),
            rms_norm_eps=float(config.get("rms_norm_eps", 1e-6)),
            rope_theta=theta,
            rope_scaling=scaling,
            qkv_bias=family == "qwen2" or bool(config.get("attention_bias", False)),
            output_bias=family == "llama" and bool(config.get("attention_bias", False)),
            mlp_bias=family == "llama" and bool(config.get("mlp_bias", False)),
            tied_embeddings=bool(config.get("tie_word_embeddings", False)),
        )


def read_eos_token_ids(folder: Path) -> tuple[int, ...]:
    """Tokens with which the model ends a text: ``eos_token_id`` as transformers reads it.

    A ``generation_config.json`` alone counts where there is one, else ``config.json``. Raises SpecError if the file
    does not read, or has something else than a token id, a list of them, or null.
    """
    has_own = (folder / "generation_config.json").is_file()
    name = "generation_config.json" if has_own else "config.json"
    ids = _read_json(folder, name).get("eos_token_id")
    ids = [] if ids is None else ids if isinstance(ids, list) else [ids]
    if not all(type(each) is int for each in ids):
        raise SpecError(f"{folder / name}: eos_token_id={ids!r}: give a token id, a list of them, or null")
    return tuple(ids)


def _read_json(folder: Path, name: str) -> dict[str, Any]:
    try:
        read = json.loads((folder / name).read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        raise SpecError(f"{folder} is no model folder: it has no {name}: give one that save_pretrained wrote") from None
    except ValueError as error:
        raise SpecError(f"{folder / name} is no JSON: {error}: mend it, or save the model again") from None
    if not isinstance(read, dict):
        raise SpecError(f"{folder / name} is no JSON object: mend it, or save the model again")
    return read


def _check_supported(config: Mapping[str, Any]) -> None:
    family = config["model_type"]
    if family not in FAMILIES:
        raise SpecError(f"model_type {family!r} is not computed here: take one of {', '.join(FAMILIES)}")
    slides = config.get("sliding_window") is not None and config.get("use_sliding_window", family != "qwen2")
    if slides or "sliding_attention" in (config.get("layer_types") or ()):
        raise SpecError(
            f"sliding_window={config.get('sliding_window')}: evicted caches need full attention: "
            "take a model without (Mistral from v0.2 on has none)"
        )
    if config.get("quantization_config"):
        raise SpecError("quantization_config: quantized weights are not read: save the model in float32 or bfloat16")
    if (activation := config.get("hidden_act", "silu")) != "silu":
        raise SpecError(f"hidden_act={activation!r}: the Llama family uses 'silu': take another model")


def _rope(config: Mapping[str, Any]) -> tuple[float, RopeScaling | None]:
    parameters = config.get("rope_parameters") or config.get("rope_scaling") or {}
    theta = float(parameters.get("rope_theta") or config.get("rope_theta") or 10000.0)
    kind = parameters.get("rope_type") or parameters.get("type") or "default"
    if kind not in _ROPE_TYPES:
        raise SpecError(f"rotary scaling {kind!r} is not computed here: take one of {', '.join(_ROPE_TYPES)}")
    if kind == "default":
        return theta, None
    if kind == "linear":
        return theta, RopeScaling(kind, float(parameters["factor"]))
    return theta, RopeScaling(
        kind,
        float(parameters["factor"]),
        float(parameters["low_freq_factor"]),
        float(parameters["high_freq_factor"]),
        int(parameters["original_max_position_embeddings"]),
    )
