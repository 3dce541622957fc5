"""Paged decode attention of other libraries, as it is installed. All tokens are alive: they know no dead ones."""

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Final, TypeAlias

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

__all__ = ["GATHERED", "STOCK", "Dense", "Layer"]

GATHERED: Final = "torch SDPA on gathered KV"
"""No paged kernel, but it runs everywhere."""

Layer: TypeAlias = Callable[[int], Tensor]
"""Attention of one layer: ``[num_reqs, num_query_heads, head_size]``."""


@dataclass(frozen=True, slots=True)
class Dense:
    """Requests of one length, which is a multiple of the block size.

    Attributes:
        q: ``[num_reqs, num_query_heads, head_size]``.
        keys, values: of each layer ``[pool_blocks, block_size, num_kv_heads, head_size]``.
        table: ``[num_reqs, length // block_size]`` int32.
        lengths, num_blocks: ``[num_reqs]`` int32.
        length: of each.
    """

    q: Tensor
    keys: list[Tensor]
    values: list[Tensor]
    table: Tensor
    lengths: Tensor
    num_blocks: Tensor
    length: int

    @property
    def scale(self) -> float:
        return float(self.q.shape[2] ** -0.5)

    @property
    def starts(self) -> Tensor:
        """``[num_reqs + 1]`` int32: one query each."""
        return torch.arange(len(self.q) + 1, dtype=torch.int32, device=self.q.device)


def _flash_vllm(dense: Dense) -> Layer:
    from vllm.vllm_flash_attn import flash_attn_varlen_func, is_fa_version_supported

    version, starts = 3 if is_fa_version_supported(3) else 2, dense.starts

    def run(layer: int) -> Tensor:
        out: Tensor = flash_attn_varlen_func(
            q=dense.q,
            k=dense.keys[layer],
            v=dense.values[layer],
            max_seqlen_q=1,
            cu_seqlens_q=starts,
            max_seqlen_k=dense.length,
            seqused_k=dense.lengths,
            block_table=dense.table,
            softmax_scale=dense.scale,
            causal=True,
            fa_version=version,
        )
        return out

    return run


def _flash(dense: Dense) -> Layer:
    attend: Any = import_module("flash_attn").flash_attn_with_kvcache

    def run(layer: int) -> Tensor:
        out: Tensor = attend(
            dense.q.unsqueeze(1),
            dense.keys[layer],
            dense.values[layer],
            cache_seqlens=dense.lengths,
            block_table=dense.table,
            softmax_scale=dense.scale,
            causal=True,
        )
        return out.squeeze(1)

    return run


def _flashinfer(dense: Dense) -> Layer:
    num_reqs, num_query_heads, head_size = dense.q.shape
    _, block_size, num_kv_heads, _ = dense.keys[0].shape
    scratch = torch.empty(128 << 20, dtype=torch.uint8, device=dense.q.device)
    wrapper: Any = import_module("flashinfer").BatchDecodeWithPagedKVCacheWrapper(scratch, "NHD", use_tensor_cores=True)
    wrapper.plan(
        dense.starts * dense.table.shape[1],
        dense.table.flatten(),
        torch.full((num_reqs,), block_size, dtype=torch.int32, device=dense.q.device),
        num_query_heads,
        num_kv_heads,
        head_size,
        block_size,
        q_data_type=dense.q.dtype,
        kv_data_type=dense.q.dtype,
        sm_scale=dense.scale,
    )

    def run(layer: int) -> Tensor:
        out: Tensor = wrapper.run(dense.q, (dense.keys[layer], dense.values[layer]))
        return out

    return run


def _unified_vllm(dense: Dense) -> Layer:
    from vllm.v1.attention.ops.triton_unified_attention import unified_attention

    starts, num_segments = dense.starts, 16
    num_reqs, num_query_heads, head_size = dense.q.shape
    rows = torch.empty(2, num_reqs, num_query_heads, num_segments, device=dense.q.device)
    parts = torch.empty(*rows.shape[1:], head_size, device=dense.q.device)
    one = torch.ones(num_reqs, dense.keys[0].shape[2], device=dense.q.device)

    def run(layer: int) -> Tensor:
        out = torch.empty_like(dense.q)
        unified_attention(
            q=dense.q,
            k=dense.keys[layer],
            v=dense.values[layer],
            out=out,
            cu_seqlens_q=starts,
            max_seqlen_q=1,
            seqused_k=dense.lengths,
            max_seqlen_k=dense.length,
            softmax_scale=dense.scale,
            causal=True,
            window_size=(-1, -1),
            block_table=dense.table,
            softcap=0,
            q_descale=None,
            k_descale=one,
            v_descale=one,
            seq_threshold_3D=128 // dense.keys[0].shape[2],
            num_par_softmax_segments=num_segments,
            softmax_segm_output=parts,
            softmax_segm_max=rows[0],
            softmax_segm_expsum=rows[1],
        )
        return out

    return run


def _gathered(dense: Dense) -> Layer:
    index = dense.table.long()

    def run(layer: int) -> Tensor:
        k, v = (pool[index].flatten(1, 2).transpose(1, 2) for pool in (dense.keys[layer], dense.values[layer]))
        out = scaled_dot_product_attention(dense.q.unsqueeze(2), k, v, scale=dense.scale, enable_gqa=True)
        return out.squeeze(2)

    return run


STOCK: Final[dict[str, Callable[[Dense], Layer]]] = {
    "flash-attn of vLLM": _flash_vllm,
    "flash-attn": _flash,
    "flashinfer": _flashinfer,
    "unified Triton attention of vLLM": _unified_vllm,
    GATHERED: _gathered,
}
