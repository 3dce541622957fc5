import random

import numpy as np
import pytest

from vtoken.errors import PoolExhausted, SpecError
from vtoken.executor import Executor
from vtoken.fingerprint import sequence_fingerprint
from vtoken.reclamation.evacuate import EvacuatePlanner
from vtoken.reclamation.fill import FillPlanner
from vtoken.reclamation.recycle import recyclable
from vtoken.reference import ReferenceExecutor
from vtoken_jax.executor import JaxExecutor

BLOCK_SIZES = [1, 16, 128]


def num_blocks(block_size):
    """One pool for each block size, so that tests share what was compiled."""
    return 4 + 300 // block_size


class World:
    """An executor beside what each request should hold: position -> bytes."""

    def __init__(self, spec, seed=0):
        self.executor, self.spec, self.random = JaxExecutor(), spec, random.Random(seed)
        self.executor.allocate(spec)
        self.tokens, self.lengths = {}, {}
        self.happened = dict.fromkeys(["moved", "recycled", "forked", "killed", "ended"], 0)

    def admit(self, req_id):
        self.executor.admit(req_id)
        self.tokens[req_id], self.lengths[req_id] = {}, 0

    def write(self, req_id, num_tokens):
        kv = [self.random.randbytes(self.spec.token_bytes) for _ in range(num_tokens)]
        self.tokens[req_id] |= dict(enumerate(kv, self.lengths[req_id]))
        self.lengths[req_id] += num_tokens
        return b"".join(kv)

    def append(self, req_id, num_tokens):
        if num_tokens <= self.executor.pool_view().num_free * self.spec.block_size:
            self.executor.append(req_id, num_tokens, self.write(req_id, num_tokens))

    def kill(self, req_id, positions):
        self.executor.kill(req_id, positions)
        for position in positions:
            self.happened["killed"] += self.tokens[req_id].pop(position, None) is not None

    def recycle(self, req_id, position):
        table = self.executor.table_view(req_id)
        if table.next_doomed(1) != [position]:
            self.executor.doom(req_id, [position])
        victim = recyclable(table, self.executor.pool_view())
        if victim is not None:
            self.executor.recycle(req_id, self.write(req_id, 1))
            del self.tokens[req_id][victim]
            self.happened["recycled"] += 1

    def launch(self, req_id, planner):
        plan = planner.plan(self.executor.table_view(req_id), self.executor.pool_view())
        if plan is not None:
            self.happened["moved"] += self.executor.launch(plan).num_moves

    def fork(self, parent, child, num_tokens):
        self.executor.fork_prefix(parent, child, num_tokens)
        self.tokens[child] = {position: self.tokens[parent][position] for position in range(num_tokens)}
        self.lengths[child] = num_tokens
        self.happened["forked"] += 1

    def fork_any(self, child):
        for parent in sorted(self.tokens):
            try:
                return self.fork(parent, child, self.spec.block_size)
            except SpecError:  # its first block is not whole any more
                continue
        return None

    def end(self, req_id, how):
        getattr(self.executor, how)(req_id)
        del self.tokens[req_id], self.lengths[req_id]
        self.happened["ended"] += 1

    def check(self):
        observed = self.executor.observe()
        assert observed.requests.keys() == self.tokens.keys()
        for req_id, request in observed.requests.items():
            assert dict(zip(request.positions, request.kv, strict=True)) == self.tokens[req_id]
            assert request.fingerprint == sequence_fingerprint(self.tokens[req_id].items())
            assert request.fingerprint == self.executor.fingerprint(req_id)
            assert request.live_words == tuple(self.executor.table_view(req_id).live_words)
        assert observed.free_block_ids.isdisjoint(observed.held_block_ids)
        in_flight = self.executor.pool_view().num_in_flight
        assert len(observed.free_block_ids) + len(observed.held_block_ids) + in_flight == self.spec.num_blocks - 1

    def random_step(self):
        draw, req_id = self.random, self.random.choice(sorted(self.tokens) or ["r0"])
        if not self.tokens or (len(self.tokens) < 3 and draw.random() < 0.2):
            return self.admit(next(name for name in ("r0", "r1", "r2", "r3") if name not in self.tokens))
        live = sorted(self.tokens[req_id])
        kind = draw.choice(
            ["append"] * 4 + ["kill"] * 3 + ["recycle"] * 2 + ["fill", "evacuate"] * 2 + ["fork", "fork", "end"]
        )
        if kind == "append":
            return self.append(req_id, draw.choice([1, 1, 3, self.spec.block_size]))
        if kind == "kill":
            return self.kill(req_id, draw.sample(live, len(live) // 3))
        if kind == "recycle" and live:
            doomed = self.executor.table_view(req_id).next_doomed(1)
            return self.recycle(req_id, doomed[0] if doomed else draw.choice(live))
        if kind in ("fill", "evacuate"):
            return self.launch(req_id, FillPlanner() if kind == "fill" else EvacuatePlanner())
        if kind == "fork" and "child" not in self.tokens:
            return self.fork_any("child")
        return self.end(req_id, draw.choice(["finish", "preempt"])) if kind == "end" else None

    def settle(self):
        self.executor.advance()
        self.executor.reap()


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("dtype", "block_size"), [("float32", 1), ("bfloat16", 16), ("float16", 64), ("float32", 128)])
def test_random_programs_keep_the_bytes_of_every_live_token(make_spec, dtype, block_size, seed):
    regime = "fenced" if seed % 2 else "ordered"
    spec = make_spec(dtype=dtype, block_size=block_size, num_blocks=8 + 32 // block_size, regime=regime)
    world = World(spec, seed)
    for _ in range(60):
        world.random_step()
        world.check()
        if world.random.random() < 0.5:
            world.settle()


def test_the_random_programs_do_everything(make_spec):
    world = World(make_spec(num_blocks=40), seed=0)
    for _ in range(300):
        world.random_step()
        world.settle()
    world.check()
    assert min(world.happened.values()) >= 5, world.happened


@pytest.mark.parametrize("block_size", BLOCK_SIZES)
def test_killed_tokens_are_gone_and_the_others_stay_in_place(make_spec, block_size):
    world = World(make_spec(block_size=block_size, num_blocks=num_blocks(block_size)))
    world.admit("a")
    world.append("a", 33)
    before = world.executor.observe().requests["a"]

    world.kill("a", [0, 7, 32])

    world.check()
    after = world.executor.observe().requests["a"]
    assert after.block_ids == before.block_ids
    assert after.positions == tuple(position for position in range(33) if position not in (0, 7, 32))


@pytest.mark.parametrize("block_size", BLOCK_SIZES)
def test_a_recycled_slot_holds_the_new_token_alone(make_spec, block_size):
    world = World(make_spec(block_size=block_size, num_blocks=num_blocks(block_size)))
    world.admit("a")
    world.append("a", 33)

    world.recycle("a", 5)

    world.check()
    assert world.executor.observe().requests["a"].positions[5] == 33


@pytest.mark.parametrize("block_size", BLOCK_SIZES)
def test_a_fork_shares_bytes_and_its_parents_evictions_do_not_reach_it(make_spec, block_size):
    world = World(make_spec(block_size=block_size, num_blocks=num_blocks(block_size)))
    world.admit("a")
    world.append("a", 128 + 9)
    world.fork("a", "b", 128)
    assert world.executor.observe().requests["b"].block_ids == tuple(range(1, 1 + 128 // block_size))

    world.kill("a", range(0, 128, 2))
    world.launch("a", FillPlanner())
    world.append("b", 3)

    world.check()
    assert (world.happened["moved"] > 0) == (block_size > 1)  # blocks of one token have no holes to fill
    assert len(world.tokens["b"]) == 131


@pytest.mark.parametrize("block_size", BLOCK_SIZES)
def test_a_rebuilt_request_reads_nothing_of_its_former_life(make_spec, block_size):
    world = World(make_spec(block_size=block_size, num_blocks=num_blocks(block_size)))
    world.admit("a")
    world.append("a", 40)
    world.kill("a", range(3, 30))

    world.end("a", "preempt")
    world.admit("a")
    empty = world.executor.observe().requests["a"]
    assert (empty.block_ids, empty.live_words, empty.positions, empty.kv) == ((), (), (), ())
    assert empty.fingerprint == "0" * 16

    world.append("a", 40)
    world.check()


def test_attention_agrees_with_the_reference_executor_after_the_same_calls(make_spec):
    spec = make_spec(num_query_heads=6)
    rng = np.random.default_rng(3)

    def floats(count):
        return rng.standard_normal(count).astype(np.float32).tobytes()

    kv, more, q = floats(14 * spec.token_elements), floats(spec.token_elements), floats(3 * spec.query_elements)
    results = []
    for executor in (ReferenceExecutor(), JaxExecutor()):
        executor.allocate(spec)
        executor.admit("a")
        executor.append("a", 14, kv)
        executor.kill("a", [0, 2, 3, 5, 13])
        executor.launch(FillPlanner().plan(executor.table_view("a"), executor.pool_view()))
        executor.doom("a", [4])
        executor.recycle("a", more)
        results.append(executor.attend("a", q, 3))

    reference, got = results
    assert got.positions == reference.positions
    assert list(got.positions) != sorted(got.positions)
    atol = 1e-5 * np.abs(reference.out).max()
    np.testing.assert_allclose(got.out, reference.out, rtol=0, atol=atol)
    np.testing.assert_allclose(got.mass, reference.mass, rtol=0, atol=1e-5 * max(reference.mass))


def test_observe_sees_what_the_arrays_hold_not_what_the_host_believes(make_spec):
    world = World(make_spec())
    world.admit("a")
    world.append("a", 6)
    store = world.executor.store
    before = world.executor.observe().requests["a"]
    block = before.block_ids[0]
    slot = block * world.spec.block_size + 2

    store.cache = store.cache._replace(positions=store.cache.positions.at[slot].set(99))
    assert world.executor.observe().requests["a"].positions == (0, 1, 99, 3, 4, 5)

    keys = store.cache.k[1].at[slot, 0].add(1)
    store.cache = store.cache._replace(k=(store.cache.k[0], keys))
    changed = world.executor.observe().requests["a"]
    assert [old == new for old, new in zip(before.kv, changed.kv, strict=True)] == [True, True, False, True, True, True]
    assert changed.fingerprint != before.fingerprint

    store.tables = store.tables._replace(live_words=store.tables.live_words.at[0, 0].set(0b1011))
    assert world.executor.observe().requests["a"].positions == (0, 1, 3, 4, 5)
    assert world.executor.attend("a", bytes(4 * world.spec.query_elements)).positions == (0, 1, 3, 4, 5)

    store.tables = store.tables._replace(free_flags=store.tables.free_flags.at[block].set(True))
    assert block in world.executor.observe().free_block_ids


def test_a_call_that_is_refused_changes_nothing(make_spec):
    world = World(make_spec(num_blocks=4))
    world.admit("a")
    world.append("a", 9)
    before = world.executor.observe()

    with pytest.raises(PoolExhausted):
        world.executor.append("a", 5, bytes(5 * world.spec.token_bytes))
    with pytest.raises(SpecError, match="kv has 1 bytes"):
        world.executor.append("a", 1, b"\0")

    assert world.executor.observe() == before


def test_allocate_starts_from_nothing(make_spec):
    world = World(make_spec())
    world.admit("a")
    world.append("a", 6)

    world.executor.allocate(world.spec)

    observed = world.executor.observe()
    assert (observed.requests, len(observed.free_block_ids)) == ({}, world.spec.num_blocks - 1)


def test_it_is_an_executor_under_its_name() -> None:
    executor: Executor = JaxExecutor()
    assert executor.name == "jax"
