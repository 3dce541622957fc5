"""What the AOT gate compiles of decode attention: the launches of ``decode`` at the shapes of real models.

``divisible_by_16`` holds where the JIT finds it so: tensors of their own, head sizes that are multiples of 16, rows of
logits and mass that are. Without it of the strides, loads are one element wide (the first negative control).
"""

from collections.abc import Sequence
from typing import Any, Final

from vtoken_torch.kernels.aot_case import AOTCase
from vtoken_torch.kernels.decode_kernels import mass_kernel, reduce_kernel, split_kernel
from vtoken_torch.kernels.decode_tile import Tile, choose_tile, mass_constants, reduce_constants, split_constants
from vtoken_torch.kernels.decode_workspace import MAX_SPLITS

__all__ = ["AOT_CASES"]

_ITEM_BYTES: Final = {"bf16": 2, "fp16": 2, "fp32": 4}
_POOL_STRIDES: Final = ("k_block", "k_slot", "k_head", "v_block", "v_slot", "v_head")
_STRIDES: Final = ("q_req", "q_head", *_POOL_STRIDES, "logits_req", "logits_head")
_POINTERS: Final = {"block_table": "*i32", "num_blocks": "*i32", "live_words": "*i32", "logits": "*fp32"}
_SCRATCH: Final = {"parts": "*fp32", "part_lse": "*fp32"}


def _split(
    dtype: str,
    heads: tuple[int, int],
    head_size: int,
    block_size: int,
    *,
    label: str = "",
    write_logits: bool = True,
    tile: Tile | None = None,
    strides: Sequence[str] = _STRIDES,
    breaks: str | None = None,
) -> AOTCase:
    num_query_heads, num_kv_heads = heads
    tile = tile or choose_tile(head_size, _ITEM_BYTES[dtype])
    pointers = {**dict.fromkeys(("q", "keys", "values"), f"*{dtype}"), **_POINTERS, **_SCRATCH}
    constants = split_constants(num_query_heads, num_kv_heads, head_size, block_size, tile, write_logits)
    return AOTCase(
        split_kernel,
        label or f"{dtype} {num_query_heads}/{num_kv_heads} D{head_size} BS{block_size}",
        _signature(split_kernel, {**pointers, "scale": "fp32"}),
        {**constants, "upcast": False},
        (*pointers, *strides),
        tile.num_warps,
        tile.num_stages,
        max_registers=168,  # three programs of four warps on a multiprocessor
        tensor_core=dtype != "fp32",
        breaks=breaks,
    )


def _reduce(dtype: str, num_query_heads: int, head_size: int) -> AOTCase:
    pointers = {**_SCRATCH, "out": f"*{dtype}", "lse": "*fp32"}
    return AOTCase(
        reduce_kernel,
        f"{dtype} {num_query_heads} D{head_size}",
        _signature(reduce_kernel, pointers),
        reduce_constants(num_query_heads, head_size, MAX_SPLITS),
        (*pointers, "out_req", "out_head"),
        wide_stores=False,  # each thread has one element of the output
        narrow_limit=1,
    )


def _mass(num_query_heads: int, block_size: int) -> AOTCase:
    pointers = {"logits": "*fp32", "lse": "*fp32", "num_blocks": "*i32", "mass": "*fp32"}
    return AOTCase(
        mass_kernel,
        f"{num_query_heads} BS{block_size}",
        _signature(mass_kernel, pointers),
        mass_constants(num_query_heads, block_size),
        (*pointers, "logits_req", "logits_head", "mass_req"),
        wide_stores=False,  # one sum for each token
    )


def _signature(kernel: Any, types: dict[str, str]) -> dict[str, str]:
    """All that is no pointer, float or constant is a 32-bit integer."""
    return {name: types.get(name, "i32") for name in kernel.arg_names}


_LLAMA_8B: Final = ((32, 8), 128)  # and Mistral-7B
_QWEN_14B: Final = ((40, 8), 128)
_LLAMA_7B: Final = ((32, 32), 128)
_LLAMA_70B: Final = ((64, 8), 128)
_SMOLLM: Final = ((9, 3), 64)
_MODELS: Final = (_LLAMA_8B, _QWEN_14B, _LLAMA_7B, _LLAMA_70B, _SMOLLM)
"""The paper's (Llama-3.1-8B, Mistral-7B-v0.3, Qwen2.5-14B), one without grouped heads, a large one, the demo's."""

AOT_CASES: Final = (
    *(_split("bf16", *model, block_size) for model in _MODELS for block_size in (16, 32)),
    *(_split("fp16", *model, 16) for model in (_LLAMA_8B, _SMOLLM)),
    *(_split("fp32", *model, 16) for model in (_LLAMA_8B, _SMOLLM)),
    _split("bf16", *_LLAMA_8B, 16, label="bf16 32/8 no logits", write_logits=False),
    _split("bf16", (32, 32), 80, 16),
    _split("bf16", (32, 32), 96, 16),
    _split("bf16", (16, 8), 256, 16),
    _split("bf16", (40, 1), 128, 64),
    _split("bf16", *_LLAMA_8B, 16, label="strides not declared", strides=("q_req", "q_head"), breaks="narrow"),
    _split("bf16", *_LLAMA_8B, 16, label="tile of 256 tokens", tile=Tile(256, num_stages=4), breaks="registers"),
    _reduce("bf16", 32, 128),
    _reduce("bf16", 40, 128),
    _reduce("bf16", 9, 64),
    _reduce("fp32", 32, 128),
    *(_mass(num_query_heads, 16) for num_query_heads in (32, 40, 64, 9)),
)
