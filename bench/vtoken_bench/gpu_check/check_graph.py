"""Decode attention and mass in a CUDA graph: it replays rightly while tables, queries and KV change beneath it."""

from typing import Final

import numpy as np
import torch

from vtoken.executor import KVSpec
from vtoken_bench.gpu_check.ground import Ground
from vtoken_bench.gpu_check.on_device import graphed
from vtoken_bench.gpu_check.twin_pool import TwinPool
from vtoken_torch.kernels.decode import token_mass

__all__ = ["check_graph"]

_SPEC: Final = KVSpec(
    num_layers=3,
    num_kv_heads=2,
    num_query_heads=8,
    head_size=64,
    dtype="bfloat16",
    block_size=16,
    num_blocks=129,
    max_num_reqs=8,
)
_TINY: Final = KVSpec(
    num_layers=1,
    num_kv_heads=1,
    num_query_heads=2,
    head_size=16,
    dtype="bfloat16",
    block_size=16,
    num_blocks=7,
    max_num_reqs=2,
)


def check_graph(ground: Ground) -> None:
    """Five changes, each followed by one replay."""
    spec = _TINY if ground.is_dry else _SPEC
    pool = TwinPool(spec, (spec.num_blocks - 1) // spec.max_num_reqs, ground.device)
    queries = torch.zeros(pool.new_queries().shape, dtype=pool.cache.keys(0).dtype, device=ground.device)
    out = torch.full(queries.shape, torch.nan, device=ground.device)
    mass = torch.zeros(spec.max_num_reqs, pool.max_blocks * spec.block_size, device=ground.device)
    logits = pool.workspace.logits
    if logits is None:
        raise AssertionError("a workspace made with logits has them")

    def step() -> None:
        pool.decode(queries, out)
        mass.zero_()
        token_mass(logits, pool.workspace.lse, pool.tables.num_blocks, mass, block_size=spec.block_size)

    _change(pool)
    pool.tables.flush()
    addresses = _addresses(pool)
    replay = graphed(step, ground)
    if ground.is_dry:
        ground.notes.append("no capture on a CPU: the same calls, one after another")
    for number in range(2 if ground.is_dry else 5):
        _change(pool)
        pool.tables.flush()  # outside the graph: a replay looks at no host memory
        asked = pool.new_queries()
        queries.copy_(asked)
        replay()
        wanted, wanted_mass = pool.expected(asked)
        ground.close(f"replay {number}: output", out.cpu().numpy(), wanted.numpy(), "bfloat16")
        ground.close(f"replay {number}: mass", mass.cpu().numpy(), wanted_mass.numpy(), "float32")
    ground.check("addresses of pool, tables and workspace stay", _addresses(pool) == addresses)


def _change(pool: TwinPool) -> None:
    """Other blocks, other live words, requests longer, shorter and gone; other KV."""
    spec, rng = pool.spec, pool.rng
    blocks = rng.permutation(np.arange(1, spec.num_blocks)).reshape(spec.max_num_reqs, -1)
    for row, ids in enumerate(blocks):
        count = int(rng.integers(0, len(ids) + 1)) if row else len(ids)
        pool.set_row(row, ids[:count].tolist(), rng.integers(1, 1 << spec.block_size, count).tolist())
    slots = torch.from_numpy(rng.permutation(spec.num_slots)[: spec.num_slots // 4])
    tokens = pool.new_tokens(len(slots))
    pool.twin.bits[:, slots] = tokens
    pool.cache.bits[:, slots.to(pool.cache.device)] = tokens.to(pool.cache.device)


def _addresses(pool: TwinPool) -> list[int]:
    workspace = pool.workspace
    held = (pool.cache.bits, pool.tables.state, workspace.parts, workspace.part_lse, workspace.lse)
    return [tensor.data_ptr() for tensor in held]
