# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
"""The three kernels of decode attention.

``split_kernel`` attends over a share of one request's tokens, ``reduce_kernel`` joins the shares, ``mass_kernel`` sums
the attention that each token got. Block table, counts and live words are read on the device.

A dead slot is never read: the loads are masked, so that no bits of it, NaN included, reach the output.

Arguments: pointers, strides in elements, compile-time constants. ``*_tile`` are powers of two. Shapes: see ``decode``.
"""

import triton
import triton.language as tl

__all__ = ["mass_kernel", "reduce_kernel", "split_kernel"]


@triton.jit(do_not_specialize=["num_splits"])
def split_kernel(
    q,
    keys,
    values,
    block_table,
    num_blocks,
    live_words,
    logits,
    parts,
    part_lse,
    scale,
    q_req,
    q_head,
    k_block,
    k_slot,
    k_head,
    v_block,
    v_slot,
    v_head,
    table_req,
    live_req,
    logits_req,
    logits_head,
    num_splits,
    num_kv_heads: tl.constexpr,
    group_size: tl.constexpr,
    group_tile: tl.constexpr,
    head_size: tl.constexpr,
    head_tile: tl.constexpr,
    block_size: tl.constexpr,
    words_per_block: tl.constexpr,
    token_tile: tl.constexpr,
    write_logits: tl.constexpr,
    upcast: tl.constexpr,
):
    """Grid (KV heads x group tiles, splits, requests): a split takes every tile from its first up to its last."""
    num_group_tiles: tl.constexpr = (group_size + group_tile - 1) // group_tile
    kv_head = (tl.program_id(0) // num_group_tiles).to(tl.int64)
    split = tl.program_id(1)
    req = tl.program_id(2).to(tl.int64)

    num_tokens = tl.load(num_blocks + req) * block_size
    num_tiles = tl.cdiv(num_tokens, token_tile)
    first = num_tiles * split // num_splits
    last = num_tiles * (split + 1) // num_splits

    dim = tl.arange(0, head_tile)
    in_head = (dim < head_size)[None, :]
    member = tl.program_id(0) % num_group_tiles * group_tile + tl.arange(0, group_tile)
    in_group = member < group_size
    head = kv_head * group_size + member
    query = tl.load(
        q + req * q_req + head[:, None] * q_head + dim[None, :], mask=in_group[:, None] & in_head, other=0.0
    )
    if upcast:
        query = query.to(tl.float32)

    peak = tl.full([group_tile], -float("inf"), tl.float32)
    total = tl.zeros([group_tile], tl.float32)
    acc = tl.zeros([group_tile, head_tile], tl.float32)
    for tile in range(first, last):
        token = tile * token_tile + tl.arange(0, token_tile)
        in_blocks = token < num_tokens
        index = token // block_size
        slot = token % block_size
        block = tl.load(block_table + req * table_req + index, mask=in_blocks, other=0).to(tl.int64)
        word = tl.load(live_words + req * live_req + index * words_per_block + slot // 32, mask=in_blocks, other=0)
        alive = ((word >> (slot % 32)) & 1) != 0
        readable = alive[:, None] & in_head

        row = block * k_block + slot * k_slot + kv_head * k_head
        key = tl.load(keys + row[:, None] + dim[None, :], mask=readable, other=0.0)
        if upcast:
            key = key.to(tl.float32)
        score = tl.dot(query, tl.trans(key), input_precision="ieee") * scale
        score = tl.where(alive[None, :], score, -float("inf"))
        if write_logits:
            at = logits + req * logits_req + head[:, None] * logits_head + token[None, :]
            tl.store(at, score, mask=in_group[:, None] & in_blocks[None, :])

        row = block * v_block + slot * v_slot + kv_head * v_head
        value = tl.load(values + row[:, None] + dim[None, :], mask=readable, other=0.0)
        peak_before = peak
        peak = tl.maximum(peak, tl.max(score, 1))
        shift = tl.where(peak == -float("inf"), 0.0, peak)  # nothing alive so far: -inf - -inf is NaN
        weight = tl.exp(score - shift[:, None])
        shrink = tl.exp(peak_before - shift)
        total = total * shrink + tl.sum(weight, 1)
        weight = weight.to(value.dtype)
        if upcast:
            weight = weight.to(tl.float32)
            value = value.to(tl.float32)
        acc = acc * shrink[:, None] + tl.dot(weight, value, input_precision="ieee")

    some = total > 0.0
    divisor = tl.where(some, total, 1.0)
    part = (req * num_kv_heads * group_size + head) * num_splits + split
    tl.store(part_lse + part, tl.where(some, peak + tl.log(divisor), -float("inf")), mask=in_group)
    written = (in_group & some)[:, None] & in_head
    tl.store(parts + part[:, None] * head_size + dim[None, :], acc / divisor[:, None], mask=written)


@triton.jit(do_not_specialize=["num_splits"])
def reduce_kernel(
    parts,
    part_lse,
    out,
    lse,
    out_req,
    out_head,
    num_splits,
    num_query_heads: tl.constexpr,
    head_size: tl.constexpr,
    head_tile: tl.constexpr,
    split_tile: tl.constexpr,
):
    """Grid (query heads, requests): the mean of the splits' outputs, weighted by their sums of exponentials."""
    head = tl.program_id(0)
    req = tl.program_id(1).to(tl.int64)
    split = tl.arange(0, split_tile)
    dim = tl.arange(0, head_tile)
    in_head = dim < head_size
    part = (req * num_query_heads + head) * num_splits + split
    logs = tl.load(part_lse + part, mask=split < num_splits, other=-float("inf"))
    peak = tl.max(logs, 0)
    some = peak > -float("inf")
    shift = tl.where(some, peak, 0.0)
    weight = tl.exp(logs - shift)
    divisor = tl.where(some, tl.sum(weight, 0), 1.0)
    written = (logs > -float("inf"))[:, None] & in_head[None, :]  # the others hold whatever was there before
    rows = tl.load(parts + part[:, None] * head_size + dim[None, :], mask=written, other=0.0)
    joined = tl.sum(rows * weight[:, None], 0) / divisor
    tl.store(out + req * out_req + head * out_head + dim, joined.to(out.dtype.element_ty), mask=in_head)
    tl.store(lse + req * num_query_heads + head, tl.where(some, shift + tl.log(divisor), -float("inf")))


@triton.jit
def mass_kernel(
    logits,
    lse,
    num_blocks,
    mass,
    logits_req,
    logits_head,
    lse_req,
    mass_req,
    num_query_heads: tl.constexpr,
    head_tile: tl.constexpr,
    block_size: tl.constexpr,
    token_tile: tl.constexpr,
):
    """Grid (programs, requests): one program owns a tile of tokens, so that the sum needs no atomics."""
    req = tl.program_id(1).to(tl.int64)
    num_tokens = tl.load(num_blocks + req) * block_size
    head = tl.arange(0, head_tile).to(tl.int64)
    in_heads = head < num_query_heads
    log_sum = tl.load(lse + req * lse_req + head, mask=in_heads, other=0.0)
    log_sum = tl.where(log_sum == -float("inf"), 0.0, log_sum)  # nothing alive: all its logits are -inf
    for start in range(tl.program_id(0) * token_tile, num_tokens, tl.num_programs(0) * token_tile):
        token = start + tl.arange(0, token_tile)
        in_blocks = token < num_tokens
        at = logits + req * logits_req + head[:, None] * logits_head + token[None, :]
        score = tl.load(at, mask=in_heads[:, None] & in_blocks[None, :], other=-float("inf"))
        paid = tl.sum(tl.exp(score - log_sum[:, None]), 0)
        before = tl.load(mass + req * mass_req + token, mask=in_blocks, other=0.0)
        tl.store(mass + req * mass_req + token, before + paid, mask=in_blocks)
