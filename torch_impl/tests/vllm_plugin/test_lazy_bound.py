"""Slots that lazy mode may be left with: no request that cannot be evacuated any further holds more."""

import random

import pytest

from vtoken.block_pool import BlockPool
from vtoken.config import VTokenConfig
from vtoken.reclamation.manager import ReclamationManager
from vtoken.request_table import RequestTable
from vtoken_torch.vllm_plugin.capacity import Capacity
from vtoken_torch.vllm_plugin.lazy.bound import headroom_blocks, num_slots_with_holes

LAZY = VTokenConfig(policy="random", kv_budget=100, mode="lazy")


def _evacuated(table, pool, manager):
    """The request once forced evacuation, with one free block to go into, gives nothing more."""
    for step in range(1000):
        table.plan_done()
        plan = manager.plan(table, pool, step, force=True)
        if plan is None:
            return table
        pool.take(plan.new_block_ids)
        table.apply_plan(plan)
        pool.free(plan.freed_block_ids)
        pool.begin_pass()
    raise AssertionError("it never ends")


@pytest.mark.parametrize("seed", range(60))
def test_no_request_is_left_with_more(seed):
    draw = random.Random(seed)
    size, num_tokens = draw.choice([8, 16, 32]), draw.randrange(1, 900)
    config = LAZY.with_changes(
        source_utilization=draw.choice([0.0, 0.1, 0.5, 0.5, 0.9]), theta_fragmentation=draw.choice([0.0, 0.25, 0.6])
    )
    num_blocks = -(-num_tokens // size)
    pool = BlockPool(num_blocks + 2)  # the null block and one that is free
    table = RequestTable("a", size)
    table.sync_new_tokens(pool.allocate(num_blocks), num_tokens)
    share = draw.random()
    is_clustered = draw.random() < 0.5
    dead = [p for p in range(num_tokens - 1) if (p / num_tokens < share if is_clustered else draw.random() < share)]
    table.evict_tokens(dead)
    _evacuated(table, pool, ReclamationManager(config))
    bound = num_slots_with_holes(config, table.num_live_tokens, size)
    assert len(table.block_ids) * size <= bound
    assert len(table.block_ids) * size < num_tokens + size


def test_capacity_counts_holes_and_keeps_the_headroom():
    eager = Capacity(LAZY.with_changes(mode="eager"), block_size=32, num_blocks=20, step_tokens=512, max_model_len=2000)
    lazy = Capacity(LAZY, block_size=32, num_blocks=20, step_tokens=512, max_model_len=2000)
    live = 100 + 64
    assert eager.bound(eager.default, 300).at(1000) == live
    assert lazy.bound(LAZY, 300).at(1000) == (live // 17 + 2) * 32
    assert lazy.bound(LAZY, 300).at(150) == 150
    assert (eager.headroom, lazy.headroom) == (0, 1)
    assert headroom_blocks(LAZY.with_changes(headroom=0.0), 20) == 1
    assert headroom_blocks(LAZY.with_changes(headroom=0.26), 20) == 6
    off = VTokenConfig(policy="none", mode="lazy")
    assert lazy.refusal(off, 100, 19 * 32) is None
    assert "needs 20 blocks at its worst, the pool has 19" in lazy.refusal(off, 100, 20 * 32)
    assert eager.refusal(off, 100, 20 * 32) is None
