"""Weights: from the safetensors files of a Hugging Face folder, and to and from an orbax checkpoint."""

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes  # noqa: F401  safetensors gives bfloat16 through it
import numpy as np
from flax import nnx
from safetensors import SafetensorError, safe_open

from vtoken.errors import SpecError
from vtoken.executor import DType
from vtoken.plugins import first_line
from vtoken_jax import checkpoint
from vtoken_jax.model.config import ModelConfig
from vtoken_jax.model.llama import Llama
from vtoken_jax.model.tiles import as_tiles

__all__ = ["FORMAT", "abstract_model", "load_checkpoint", "load_weights", "save_checkpoint"]

FORMAT = "vtoken-jax/weights/1"

_LAYER_PARTS = {
    "input_norm": ["input_layernorm"],
    "qkv": ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"],
    "output": ["self_attn.o_proj"],
    "post_norm": ["post_attention_layernorm"],
    "gate_up": ["mlp.gate_proj", "mlp.up_proj"],
    "down": ["mlp.down_proj"],
}
"""Ours to the folder's: parts that share one matrix are stacked in this order."""

_OUTER = {
    ("embedding",): "model.embed_tokens.weight",
    ("norm", "weight"): "model.norm.weight",
    ("head", "weight"): "lm_head.weight",
}

_Path = tuple[Any, ...]


def abstract_model(config: ModelConfig, dtype: DType) -> tuple[nnx.GraphDef[Any], nnx.State]:
    """The model's structure and the shapes of its weights; nothing is allocated."""
    graph, state = nnx.split(nnx.eval_shape(lambda: Llama(config, jnp.dtype(dtype))))
    return graph, state


def load_weights(
    folder: Path, config: ModelConfig, dtype: DType, *, in_tiles: bool = False
) -> tuple[nnx.GraphDef[Any], nnx.State]:
    """Reads all weights, cast to ``dtype``, one after the other, so that few are in memory twice.

    ``in_tiles`` gives matrices that multiply as ``vtoken_jax.model.tiles`` says: for this process, not a checkpoint.

    Raises:
        SpecError: no safetensors file, a damaged one, a missing weight, or one of another shape.
    """
    graph, state = abstract_model(config, dtype)

    def form(path: _Path, weight: np.ndarray) -> np.ndarray:
        multiplies = weight.ndim == 2 and (path != ("embedding",) or config.tied_embeddings)
        return as_tiles(weight) if in_tiles and multiplies else weight

    with ExitStack() as stack:
        read = _reader(folder, stack)
        weights = [
            (path, leaf.replace(jnp.asarray(form(path, _weight(read, folder, path, leaf.shape)), jnp.dtype(dtype))))
            for path, leaf in nnx.to_flat_state(state)
        ]
    return graph, nnx.from_flat_state(weights)


def save_checkpoint(folder: Path, config: ModelConfig, dtype: DType, state: nnx.State) -> None:
    """Writes weights by orbax into a new folder. Raises SpecError if it exists, or cannot be written."""
    checkpoint.save(folder, {"format": FORMAT, "model": _model_facts(config, dtype)}, jax.tree.leaves(state))


def load_checkpoint(folder: Path, config: ModelConfig, dtype: DType) -> tuple[nnx.GraphDef[Any], nnx.State]:
    """Reads weights that ``save_checkpoint`` wrote. Raises SpecError if they are torn, or another model's."""
    theirs, ours = checkpoint.load_meta(folder, FORMAT)["model"], _model_facts(config, dtype)
    if theirs != ours:
        raise SpecError(f"{folder} holds another model: {theirs}, not {ours}")
    graph, state = abstract_model(config, dtype)
    leaves = checkpoint.load_arrays(folder, jax.tree.leaves(state))
    return graph, jax.tree.unflatten(jax.tree.structure(state), leaves)


def _model_facts(config: ModelConfig, dtype: DType) -> str:
    return f"{config!r} in {dtype}"


def _weight(read: Callable[[str], np.ndarray], folder: Path, path: _Path, shape: tuple[int, ...]) -> np.ndarray:
    parts = [read(name) for name in _names(path)]
    whole = parts[0] if len(parts) == 1 else np.concatenate(parts)
    if whole.shape != shape:
        raise SpecError(
            f"{folder}: weight {_names(path)[0]} has shape {list(whole.shape)}, config.json says {list(shape)}: "
            "files of two models are mixed: download it again"
        )
    return whole


def _names(path: _Path) -> list[str]:
    if path in _OUTER:
        return [_OUTER[path]]
    _, index, part, kind = path
    return [f"model.layers.{index}.{name}.{kind}" for name in _LAYER_PARTS[part]]


def _reader(folder: Path, stack: ExitStack) -> Callable[[str], np.ndarray]:
    """Reads a weight by its name from whichever file holds it."""
    holder: dict[str, Any] = {}
    for file in _files(folder):
        try:
            opened = stack.enter_context(safe_open(file, "numpy"))
        except (SafetensorError, OSError) as error:
            raise SpecError(f"{file} does not open: {first_line(error)}: download it again") from None
        holder |= dict.fromkeys(opened.keys(), opened)

    def read(name: str) -> np.ndarray:
        try:
            tensor: np.ndarray = holder[name].get_tensor(name)
        except KeyError:
            raise SpecError(f"{folder} lacks the weight {name}: download it again") from None
        except SafetensorError as error:
            raise SpecError(f"{folder}: weight {name} does not read: {first_line(error)}: download it again") from None
        return tensor

    return read


def _files(folder: Path) -> Iterator[Path]:
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        yield folder / "model.safetensors"
        return
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise SpecError(f"{index} is no index of safetensors files: {error!r}: download it again") from None
    yield from (folder / name for name in names)
