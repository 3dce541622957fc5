"""Decode attention over a paged KV cache in Triton: one query for each request, which sees all its live tokens.

Everything that changes from step to step is read on the device, and grids depend on the batch's rows alone: nothing
waits for the host or allocates, and a CUDA graph may capture it all.
"""

from typing import Final

import torch
from torch import Tensor
from triton import JITFunction

from vtoken.errors import SpecError
from vtoken.types import cdiv
from vtoken_torch.kernels.decode_checks import check_floats, check_integers, check_tables, check_tensors
from vtoken_torch.kernels.decode_kernels import mass_kernel, reduce_kernel, split_kernel
from vtoken_torch.kernels.decode_tile import (
    MASS_TILE,
    MIN_TILE,
    WORD_BITS,
    choose_tile,
    mass_constants,
    reduce_constants,
    split_constants,
)
from vtoken_torch.kernels.decode_workspace import DecodeWorkspace

__all__ = ["paged_decode", "reference_decode", "token_mass"]

_MASS_PROGRAMS: Final = 1024  # of a batch: fill any device, and cost little where requests are short


def paged_decode(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    block_table: Tensor,
    num_blocks: Tensor,
    live_words: Tensor,
    *,
    scale: float,
    out: Tensor,
    workspace: DecodeWorkspace,
    logits: Tensor | None = None,
) -> None:
    """Attention of one query token for each request (query length 1, causal, no window, no soft cap).

    Writes ``out`` and ``workspace.lse``. A request with no live token, or with no block (a padding row), gives zeros
    and -inf. Rows of the tables past a request's blocks may hold anything.

    Args:
        q: ``[num_reqs, num_query_heads, head_size]`` float32, bfloat16 or float16. Query head h reads KV head
            ``h // (num_query_heads // num_kv_heads)``.
        keys, values: ``[pool_blocks, block_size, num_kv_heads, head_size]`` in the dtype of ``q``, with any strides but
            1 in the last dimension: a view of whatever the pool is. Loads are 16 bytes wide where the other strides and
            the address are multiples of 16.
        block_table: ``[>= num_reqs, max_blocks]`` int32, block ids in table order.
        num_blocks: ``[>= num_reqs]`` int32, at most ``max_blocks``.
        live_words: ``[>= num_reqs, max_blocks, words_per_block]`` int32 in table order; bit o % 32 of word o // 32 is
            slot o.
        scale: of the logits.
        out: shaped like ``q``, in any of its dtypes.
        workspace: whatever it held before is lost.
        logits: ``[>= num_reqs, num_query_heads, >= max_blocks * block_size]`` float32, as ``workspace.logits``; None:
            not written.

    Raises:
        SpecError: a shape, dtype, stride or device that is not served.
    """
    check_tensors(q, keys, values, out, workspace)
    check_tables(q, keys, block_table, num_blocks, live_words, workspace)
    _check_device(q)
    num_reqs, num_query_heads, head_size = q.shape
    _, block_size, num_kv_heads, _ = keys.shape
    if logits is not None:
        check_floats("logits", logits, (num_reqs, num_query_heads, block_table.shape[1] * block_size))
    if num_reqs == 0:
        return
    num_head_programs = num_kv_heads * cdiv(num_query_heads // num_kv_heads, MIN_TILE)
    tile = workspace.tile or choose_tile(head_size, q.element_size())
    num_splits = workspace.num_splits(num_reqs)
    with _current(q):
        split_kernel[num_head_programs, num_splits, num_reqs](
            q,
            keys,
            values,
            block_table,
            num_blocks,
            live_words,
            workspace.parts if logits is None else logits,  # not touched without logits
            workspace.parts,
            workspace.part_lse,
            scale,
            *q.stride()[:2],
            *keys.stride()[:3],
            *values.stride()[:3],
            block_table.stride(0),
            live_words.stride(0),
            *((0, 0) if logits is None else logits.stride()[:2]),
            num_splits,
            **split_constants(num_query_heads, num_kv_heads, head_size, block_size, tile, logits is not None),
            upcast=q.dtype == torch.bfloat16 and q.device.type == "cpu",  # Triton's interpreter multiplies their bits
            num_warps=tile.num_warps,
            num_stages=tile.num_stages,
            enable_fp_fusion=True,
        )
        reduce_kernel[num_query_heads, num_reqs](
            workspace.parts,
            workspace.part_lse,
            out,
            workspace.lse,
            *out.stride()[:2],
            num_splits,
            **reduce_constants(num_query_heads, head_size, num_splits),
            enable_fp_fusion=True,
        )


def token_mass(logits: Tensor, lse: Tensor, num_blocks: Tensor, mass: Tensor, *, block_size: int) -> None:
    """Adds the attention that each token got, summed over query heads: ``exp(logit - lse)``.

    Dead slots get 0; what lies past a request's blocks is not touched.

    Args:
        logits: ``[>= num_reqs, num_query_heads, max_tokens]`` float32, from ``paged_decode``.
        lse: ``[>= num_reqs, num_query_heads]`` float32: ``workspace.lse``.
        num_blocks: ``[>= num_reqs]`` int32.
        mass: ``[num_reqs, max_tokens]`` float32, by place in the block table: table index * block_size + slot.
        block_size: slots of a block.

    Raises:
        SpecError: a shape or dtype that is not served.
    """
    num_reqs, max_tokens = mass.shape
    num_query_heads = lse.shape[1]
    check_floats("logits", logits, (num_reqs, num_query_heads, max_tokens))
    check_floats("lse", lse, (num_reqs, num_query_heads))
    check_floats("mass", mass, (num_reqs, max_tokens))
    check_integers("num_blocks", num_blocks, (num_reqs,))
    _check_device(mass)
    if num_reqs == 0:
        return
    num_programs = min(cdiv(max_tokens, MASS_TILE), cdiv(_MASS_PROGRAMS, num_reqs))
    with _current(mass):
        mass_kernel[num_programs, num_reqs](
            logits,
            lse,
            num_blocks,
            mass,
            *logits.stride()[:2],
            lse.stride(0),
            mass.stride(0),
            **mass_constants(num_query_heads, block_size),
            enable_fp_fusion=True,
        )


def _check_device(tensor: Tensor) -> None:
    if tensor.device.type == "cpu" and isinstance(split_kernel, JITFunction):
        raise SpecError("tensors on the CPU, where no Triton kernel runs: call reference_decode")


def _current(tensor: Tensor) -> torch.cuda.device:
    """Triton launches on the current device, not on the tensors'."""
    return torch.cuda.device(tensor.device if tensor.is_cuda else -1)  # -1: as it is


# -- reference -------------------------------------------------------------------------------------------------------


def reference_decode(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    block_table: Tensor,
    num_blocks: Tensor,
    live_words: Tensor,
    *,
    scale: float,
    dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor, Tensor]:
    """The same in plain PyTorch, on any device, computed in ``dtype``. Arguments as in ``paged_decode``.

    Returns:
        ``out`` ``[num_reqs, num_query_heads, head_size]``, ``lse`` ``[num_reqs, num_query_heads]``, and the mass of one
        layer ``[num_reqs, max_blocks * block_size]``, summed over query heads.
    """
    num_reqs, num_query_heads, head_size = q.shape
    _, block_size, num_kv_heads, _ = keys.shape
    groups = (num_reqs, num_kv_heads, num_query_heads // num_kv_heads)
    num_blocks, block_table, live_words = num_blocks[:num_reqs], block_table[:num_reqs], live_words[:num_reqs]
    held = torch.arange(block_table.shape[1], device=q.device) < num_blocks.unsqueeze(1)
    bits = live_words.unsqueeze(-1) >> torch.arange(WORD_BITS, dtype=torch.int32, device=q.device) & 1
    alive = (bits.flatten(2)[..., :block_size].bool() & held.unsqueeze(-1)).flatten(1)  # [num_reqs, max_tokens]
    blocks = block_table.long().masked_fill(~held, 0)
    dead = ~alive[:, :, None, None]
    # where a slot is dead, 0: a masked weight times NaN would be NaN
    k, v = (rows[blocks].flatten(1, 2).to(dtype).masked_fill(dead, 0.0) for rows in (keys, values))
    grouped = q.to(dtype).reshape(*groups, head_size) * scale
    logits = torch.einsum("bhgd,bthd->bhgt", grouped, k).flatten(1, 2).masked_fill(~alive.unsqueeze(1), -torch.inf)
    lse = logits.logsumexp(-1)
    weights = torch.exp(logits - lse.masked_fill(lse.isinf(), 0.0).unsqueeze(-1))
    out = torch.einsum("bhgt,bthd->bhgd", weights.view(*groups, weights.shape[-1]), v)
    return out.flatten(1, 2), lse, weights.sum(1)
