"""Attention that skips dead slots, on vLLM's CPU cache, against attention by hand in float64."""

from types import SimpleNamespace

import pytest
import torch

LENGTHS = (70, 5, 33, 150, 64, 700, 40)
QUERIES = (1, 1, 1, 40, 33, 1, 3)
INTACT = (1, 6)  # rows without holes
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2**-7, torch.float16: 2**-10}


def _holes(seed=5, intact=INTACT):
    """Dead slots by row, half of each row's; the step's own tokens live."""
    draw = torch.Generator().manual_seed(seed)
    dead = {}
    for row, (length, num_queries) in enumerate(zip(LENGTHS, QUERIES, strict=True)):
        if row not in intact:
            order = torch.randperm(length - num_queries, generator=draw)
            dead[row] = order[: len(order) // 2 + 1].sort().values
    dead[5] = torch.cat([torch.arange(32, 320), dead[5][dead[5] >= 330]])  # whole blocks too
    return dead


def _words(dead, length, block_size):
    from vtoken_torch.vllm_plugin.record import LiveWords

    words = [(1 << block_size) - 1] * -(-length // block_size)
    for slot in dead.tolist():
        words[slot // block_size] &= ~(1 << slot % block_size)
    return LiveWords(0, tuple(words))


def _keeper(step, dead):
    """In place on the step's layer, and told."""
    from vtoken_torch.vllm_plugin.lazy.holes import HoleKeeper
    from vtoken_torch.vllm_plugin.record import StepRecord

    spec = SimpleNamespace(block_size=step.block_size)
    groups = SimpleNamespace(kv_cache_groups=[SimpleNamespace(kv_cache_spec=spec)])
    keeper = HoleKeeper(SimpleNamespace(layers=[step.layer], runner=SimpleNamespace(kv_cache_config=groups)))
    words = {str(row): _words(slots, step.lengths[row], step.block_size) for row, slots in dead.items()}
    keeper.before_moves(StepRecord(live_words=words))
    keeper.before_forward([str(row) for row in range(len(step.lengths))])
    return keeper


def _assert_right(step, dead):
    output, expected = step.forward(), step.attention(dead)
    assert output.dtype == step.query.dtype
    error = float((output.double() - expected).abs().max() / expected.abs().max())
    assert error < TOLERANCE[output.dtype], f"off by {error:.1e}"


@pytest.mark.parametrize(
    "case",
    [
        {"num_heads": 6, "num_kv_heads": 2},
        {"num_heads": 6, "num_kv_heads": 2, "block_size": 64, "dtype": torch.bfloat16},
        {"num_heads": 4, "num_kv_heads": 4, "isa": "vec16", "dtype": torch.float16},
        {"num_heads": 3, "softcap": 2.0},
        {"num_heads": 3, "sinks": torch.tensor([0.7, -3.0, 5.0])},
    ],
    ids=lambda case: " ".join(f"{name}={str(value).removeprefix('torch.')}" for name, value in case.items()),
)
def test_rows_with_holes_and_without(monkeypatch, case):
    from vllm_step import KernelStep

    from vtoken_torch.vllm_plugin.lazy import holes, live_attention

    step, dead = KernelStep(LENGTHS, QUERIES, **case), _holes()
    keeper = _keeper(step, dead)
    _assert_right(step, dead)
    assert len(keeper._step.rows) == 3  # decode at once, and two chunks
    monkeypatch.setattr(holes, "_GROUP_SLOTS", 100)
    monkeypatch.setattr(live_attention, "_TILE", 1000)
    keeper = _keeper(KernelStep(LENGTHS, QUERIES, **case), dead)
    _assert_right(step, dead)


def test_nothing_leaks_out_of_dead_slots():
    from vllm_step import KernelStep

    step, dead = KernelStep(LENGTHS, QUERIES, num_heads=6, num_kv_heads=2, garbage=torch.nan), _holes(intact=())
    for row, slots in dead.items():
        poison = torch.full((len(slots), 2, 64), torch.nan)
        step.write(row, slots, poison, poison)
    keeper = _keeper(step, dead)
    _assert_right(step, dead)
    assert keeper._step.others is None  # every row has holes


def test_every_step_has_its_own_holes():
    from vllm_step import KernelStep

    from vtoken_torch.vllm_plugin.record import StepRecord

    step, dead = KernelStep(LENGTHS, QUERIES, num_heads=2), _holes()
    keeper = _keeper(step, dead)
    _assert_right(step, dead)
    assert keeper.acts
    keeper.requests_left(["0"])  # preempted
    keeper.before_moves(StepRecord(live_words={"3": _words(dead[4], 70, 32)}))
    keeper.before_forward(["0", "1", "2", "3", "other", "5", "6"])
    late = dead[3][dead[3] >= 96]  # in blocks of which nothing new was said
    _assert_right(step, {2: dead[2], 3: torch.cat([dead[4], late]), 5: dead[5]})
    keeper.requests_left(["2", "3", "4", "5"])
    keeper.before_moves(StepRecord())
    assert not keeper.acts
    _assert_right(step, {})


def test_mass_of_rows_with_holes(monkeypatch):
    """Both implementations over one another; a hole has a column without mass, whatever lies there."""
    from vllm_step import KernelStep

    from vtoken_torch.vllm_plugin.mass import collector as module

    monkeypatch.setattr(module, "tensor_model_parallel_all_reduce", lambda masses: masses)
    step, dead = KernelStep(LENGTHS, QUERIES, num_heads=6, num_kv_heads=2), _holes()
    for row, slots in dead.items():
        poison = torch.full((len(slots), 2, 64), torch.nan)
        step.write(row, slots, poison, poison)
    keeper = _keeper(step, dead)
    collector = module.MassCollector(lambda: [step.layer], keeper)
    windows = {0: 0, 1: 0, 3: 0, 4: 5, 5: 1}
    collector.begin([step.ask(row, window) for row, window in windows.items()])
    _assert_right(step, dead)
    found = collector.end()
    assert sorted(found) == ["0", "1", "3", "4", "5"]
    for req_id, masses in found.items():
        row = int(req_id)
        expected = step.weights(row, dead).sum(0)
        expected = expected[-5:] if row == 4 else expected.sum(0, keepdim=True)
        assert torch.allclose(masses.double(), expected, rtol=1e-5, atol=1e-6), f"row {row}"
