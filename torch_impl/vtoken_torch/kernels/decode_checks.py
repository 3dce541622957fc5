"""What decode attention refuses, before anything is launched. Only shapes, strides and dtypes are looked at."""

from typing import Final

import torch
from torch import Tensor

from vtoken.errors import SpecError
from vtoken.types import cdiv
from vtoken_torch.kernels.decode_tile import WORD_BITS
from vtoken_torch.kernels.decode_workspace import DecodeWorkspace

__all__ = ["MAX_HEAD_SIZE", "check_floats", "check_integers", "check_tables", "check_tensors"]

MAX_HEAD_SIZE: Final = 256

_DTYPES: Final = (torch.float32, torch.bfloat16, torch.float16)


def check_tensors(q: Tensor, keys: Tensor, values: Tensor, out: Tensor, workspace: DecodeWorkspace) -> None:
    """Queries, pool and output, against each other and the workspace."""
    num_reqs, num_query_heads, head_size = q.shape
    if q.dtype not in _DTYPES or not q.dtype == keys.dtype == values.dtype or out.dtype not in _DTYPES:
        dtypes = ", ".join(str(tensor.dtype) for tensor in (q, keys, values, out))
        raise SpecError(f"q, keys, values, out are {dtypes}: give float32, bfloat16 or float16, q like keys and values")
    if head_size > MAX_HEAD_SIZE:
        raise SpecError(f"head_size={head_size}: decode attention serves at most {MAX_HEAD_SIZE}")
    if keys.shape != values.shape or keys.shape[3] != head_size or out.shape != q.shape:
        raise SpecError(
            f"q {tuple(q.shape)}, keys {tuple(keys.shape)}, values {tuple(values.shape)}, out {tuple(out.shape)}: give "
            "q and out one shape, keys and values one shape, and all one head size"
        )
    for name, tensor in (("q", q), ("keys", keys), ("values", values), ("out", out)):
        if tensor.stride(-1) != 1 and head_size > 1:
            raise SpecError(
                f"{name} has stride {tensor.stride(-1)} in head_size: give one head's elements side by side"
            )
    heads = (num_query_heads, keys.shape[2], head_size)
    served = (workspace.num_query_heads, workspace.num_kv_heads, workspace.head_size)
    if heads != served or num_reqs > workspace.max_num_reqs:
        raise SpecError(
            f"{num_reqs} requests of query heads, KV heads, head size {heads} in a workspace for "
            f"{workspace.max_num_reqs} of {served}: make one that fits"
        )


def check_tables(
    q: Tensor, keys: Tensor, block_table: Tensor, num_blocks: Tensor, live_words: Tensor, workspace: DecodeWorkspace
) -> None:
    """The batch's rows of the tables."""
    num_reqs, block_size = len(q), keys.shape[1]
    max_blocks, words_per_block = block_table.shape[1], cdiv(block_size, WORD_BITS)
    check_integers("block_table", block_table, (num_reqs, max_blocks))
    check_integers("num_blocks", num_blocks, (num_reqs,))
    check_integers("live_words", live_words, (num_reqs, max_blocks, words_per_block))
    if live_words.stride(1) != words_per_block:
        raise SpecError(f"live_words has strides {live_words.stride()}: give a request's words side by side")
    if max_blocks * block_size > workspace.max_tokens:
        raise SpecError(
            f"a table of {max_blocks} blocks of {block_size} in a workspace for max_tokens={workspace.max_tokens}: "
            "make one that fits, or give fewer columns of the table"
        )


def check_integers(name: str, tensor: Tensor, shape: tuple[int, ...]) -> None:
    """int32 of this shape or larger."""
    _check(name, tensor, torch.int32, shape)


def check_floats(name: str, tensor: Tensor, shape: tuple[int, ...]) -> None:
    """float32 of this shape or larger."""
    _check(name, tensor, torch.float32, shape)


def _check(name: str, tensor: Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    fits = len(tensor.shape) == len(shape) and all(map(int.__ge__, tensor.shape, shape))
    if tensor.dtype != dtype or not fits or tensor.stride(-1) != 1:
        raise SpecError(
            f"{name} is {tensor.dtype} {tuple(tensor.shape)} with strides {tensor.stride()}: "
            f"give {dtype} {shape} or larger, with elements side by side"
        )
