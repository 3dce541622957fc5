import random
from array import array

import pytest
import torch

from vtoken.errors import PoolExhausted, SpecError
from vtoken.executor import Executor
from vtoken.fingerprint import sequence_fingerprint
from vtoken.reclamation.evacuate import EvacuatePlanner
from vtoken.reclamation.fill import FillPlanner
from vtoken.reclamation.recycle import recyclable
from vtoken.reference import ReferenceExecutor
from vtoken_torch.copy_engine import StreamedCopyEngine
from vtoken_torch.copy_engine.fake_executor import FakeStreamExecutor
from vtoken_torch.executor import TorchExecutor


class Program:
    """Random calls on an executor beside a model that knows nothing but position -> bytes."""

    def __init__(self, executor, spec, seed):
        executor.allocate(spec)
        self.executor, self.spec, self.rng = executor, spec, random.Random(seed)
        self.tokens = {}  # req_id -> {position: kv}
        self.lengths = {}
        self.doomed = {}
        self.num_moves = self.num_recycled = self.num_forks = 0

    def bytes_of(self, num_tokens):
        return [self.rng.randbytes(self.spec.token_bytes) for _ in range(num_tokens)]

    def step(self):
        idle = [name for name in "abc" if name not in self.tokens]
        has_room = len(self.tokens) < self.spec.max_num_reqs
        if idle and has_room and (not self.tokens or self.rng.random() < 0.3):
            self.admit(self.rng.choice(idle))
        calls = [self.append, self.kill, self.recycle, self.launch, self.fork, self.end]
        (call,) = self.rng.choices(calls, weights=[6, 4, 2, 3, 2, 0.5])
        call(self.rng.choice(sorted(self.tokens)))
        if self.rng.random() < 0.7:
            self.executor.advance()
            self.executor.reap()

    def admit(self, req_id):
        self.executor.admit(req_id)
        self.tokens[req_id], self.lengths[req_id], self.doomed[req_id] = {}, 0, []

    def append(self, req_id):
        kv = self.bytes_of(self.rng.choice([1, 1, 1, self.spec.block_size, 13]))
        try:
            self.executor.append(req_id, len(kv), b"".join(kv))
        except PoolExhausted:
            return
        start = self.lengths[req_id]
        self.tokens[req_id].update(enumerate(kv, start))
        self.lengths[req_id] += len(kv)

    def kill(self, req_id):
        live = sorted(self.tokens[req_id])
        victims = self.rng.sample(live, self.rng.choice([min(len(live), 3), len(live) // 4]))
        assert self.executor.kill(req_id, victims) == victims
        for position in victims:
            del self.tokens[req_id][position]
        self.doomed[req_id] = [position for position in self.doomed[req_id] if position in self.tokens[req_id]]

    def recycle(self, req_id):
        choice = sorted(set(self.tokens[req_id]) - set(self.doomed[req_id]))
        if choice:
            self.doomed[req_id].append(self.rng.choice(choice))
            self.executor.doom(req_id, self.doomed[req_id][-1:])
        if recyclable(self.executor.table_view(req_id), self.executor.pool_view()) is None:
            return
        victim, (kv,) = self.doomed[req_id].pop(0), self.bytes_of(1)
        self.executor.recycle(req_id, kv)
        del self.tokens[req_id][victim]
        self.tokens[req_id][self.lengths[req_id]] = kv
        self.lengths[req_id] += 1
        self.num_recycled += 1

    def launch(self, req_id):
        planner = self.rng.choice([FillPlanner(), EvacuatePlanner()])
        plan = planner.plan(self.executor.table_view(req_id), self.executor.pool_view())
        if plan is not None:
            self.num_moves += self.executor.launch(plan).num_moves

    def fork(self, req_id):
        for parent in sorted(self.tokens):
            child, num_tokens = parent + "2", self.spec.block_size
            prefix = {position: self.tokens[parent].get(position) for position in range(num_tokens)}
            try:
                self.executor.fork_prefix(parent, child, num_tokens)
            except SpecError:  # evicted, moved or not yet written, the child is there already, or no row is left
                continue
            self.tokens[child], self.lengths[child], self.doomed[child] = prefix, num_tokens, []
            self.num_forks += 1
            return

    def end(self, req_id):
        self.rng.choice([self.executor.finish, self.executor.preempt])(req_id)
        del self.tokens[req_id], self.lengths[req_id], self.doomed[req_id]

    def check(self):
        observation = self.executor.observe()
        assert observation.requests.keys() == self.tokens.keys()
        for req_id, request in observation.requests.items():
            assert dict(zip(request.positions, request.kv, strict=True)) == self.tokens[req_id]
            assert request.fingerprint == sequence_fingerprint(self.tokens[req_id].items())
        free, held = observation.free_block_ids, observation.held_block_ids
        assert not free & held
        assert 0 not in free | held
        assert len(free) + len(held) + self.executor.pool_view().num_in_flight == self.spec.num_blocks - 1


def run(program, num_steps=60):
    for _ in range(num_steps):
        program.step()
        program.check()


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(
    ("dtype", "block_size"),
    [("float32", 1), ("bfloat16", 4), ("float16", 16), ("bfloat16", 33), ("float32", 64), ("float16", 128)],
)
def test_random_programs_keep_the_bytes_of_every_live_token(make_spec, device, dtype, block_size, seed):
    regime = "fenced" if seed % 2 else "ordered"
    num_blocks = 8 + 40 // block_size
    spec = make_spec(dtype=dtype, block_size=block_size, num_blocks=num_blocks, max_num_reqs=6, regime=regime)
    run(Program(TorchExecutor(device), spec, seed))


def test_the_random_programs_do_move_recycle_and_share(make_spec):
    program = Program(TorchExecutor(), make_spec(num_blocks=40, max_num_reqs=6), seed=0)
    run(program, 300)
    assert program.num_moves > 50
    assert program.num_recycled > 5
    assert program.num_forks > 2


@pytest.mark.parametrize("regime", ["ordered", "fenced"])
def test_moves_that_happen_late_keep_the_bytes_of_every_live_token(make_spec, regime):
    executor = FakeStreamExecutor()
    program = Program(executor, make_spec(num_blocks=40, max_num_reqs=6, regime=regime), seed=0)
    run(program, 150)
    assert executor.moves.num_moves == program.num_moves > 20


def test_a_store_that_reads_before_the_moves_have_happened_is_noticed(make_spec, monkeypatch):
    monkeypatch.setattr(StreamedCopyEngine, "wait", lambda self: None)
    with pytest.raises(AssertionError):
        run(Program(FakeStreamExecutor(), make_spec(num_blocks=40, max_num_reqs=6), seed=0), 150)


def test_attention_agrees_with_the_reference_executor_after_the_same_calls(make_spec):
    spec = make_spec(num_kv_heads=2, num_query_heads=6)
    values = random.Random(3)

    def floats(count):
        return array("f", (values.gauss(0, 1) for _ in range(count))).tobytes()

    kv, more, q = floats(14 * spec.token_elements), floats(spec.token_elements), floats(3 * spec.query_elements)
    results = []
    for executor in (ReferenceExecutor(), TorchExecutor()):
        executor.allocate(spec)
        executor.admit("r")
        executor.append("r", 14, kv)
        executor.kill("r", [0, 2, 3, 5, 13])
        executor.launch(FillPlanner().plan(executor.table_view("r"), executor.pool_view()))
        executor.doom("r", [4])
        executor.recycle("r", more)
        results.append(executor.attend("r", q, 3))
    reference, got = results
    assert got.positions == reference.positions
    scale = max(map(abs, reference.out))
    assert list(got.out) == pytest.approx(list(reference.out), abs=1e-5 * scale, rel=0)
    assert list(got.mass) == pytest.approx(list(reference.mass), abs=1e-6, rel=1e-5)


def test_a_rebuilt_request_reads_nothing_of_its_former_life(make_spec, device):
    spec = make_spec()
    program = Program(TorchExecutor(device), spec, seed=5)
    program.admit("a")
    program.append("a")
    program.executor.preempt("a")
    program.executor.admit("a")
    request = program.executor.observe().requests["a"]
    assert (request.block_ids, request.live_words, request.positions, request.kv) == ((), (), (), ())
    assert request.fingerprint == "0" * 16


def test_observe_sees_what_the_arrays_hold_not_what_the_host_believes(make_spec):
    executor = TorchExecutor()
    spec = make_spec()
    executor.allocate(spec)
    executor.admit("a")
    executor.append("a", 6, bytes(6 * spec.token_bytes))
    before = executor.observe().requests["a"]
    slot = before.block_ids[0] * spec.block_size + 2

    executor.store.cache.bits[0, slot, 0] = 1
    changed = executor.observe().requests["a"]
    assert changed.kv[2] == b"\x01" + bytes(spec.token_bytes - 1)
    assert changed.fingerprint != before.fingerprint

    executor.store.cache.positions[slot] = 99
    assert executor.observe().requests["a"].positions == (0, 1, 99, 3, 4, 5)

    executor.store.tables.live_words[0, 0, 0] = 0b1011
    assert executor.observe().requests["a"].positions == (0, 1, 3, 4, 5)

    executor.store.tables.free[before.block_ids[0]] = True
    assert before.block_ids[0] in executor.observe().free_block_ids


def test_the_fingerprint_alone_is_the_observed_one(make_spec, device):
    program = Program(TorchExecutor(device), make_spec(), seed=2)
    program.admit("a")
    program.append("a")
    program.kill("a")
    assert program.executor.fingerprint("a") == program.executor.observe().requests["a"].fingerprint


def test_it_is_an_executor_on_the_cpu_unless_told_otherwise():
    executor: Executor = TorchExecutor()
    assert executor.name == "torch"
    assert TorchExecutor().device == torch.device("cpu")


@pytest.mark.parametrize("device", ["tpu-of-mars", "meta:x", "cuda:99"])
def test_an_unusable_device_is_refused_by_name(device):
    with pytest.raises(SpecError, match=f"device='{device}': .*'cpu' always works"):
        TorchExecutor(device)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_arrays_lie_on_the_gpu_when_asked_for(make_spec):
    executor = TorchExecutor("cuda")
    executor.allocate(make_spec())
    assert executor.store.cache.bits.is_cuda
    assert executor.store.tables.live_words.is_cuda
