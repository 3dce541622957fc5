"""Moves in an engine's step: one launch for all plans of a pass, there before the step's first KV write (INV-3)."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch
from hf_world import World, prompt, tiny_model

from vtoken.policies import MassNeed
from vtoken.policies.ranking import Choice
from vtoken.serving.protocol import SamplingParams
from vtoken.types import Move
from vtoken_torch.copy_engine import CUDACopyEngine, StreamedCopyEngine
from vtoken_torch.copy_engine.fake_executor import fake_stream_copies
from vtoken_torch.engine import TorchEngine
from vtoken_torch.hf import runner as runner_module
from vtoken_torch.hf.runner import HFRunner
from vtoken_torch.kv_store import TorchKVStore

PROMPTS = [prompt(22 + number, number) for number in range(4)]
FILL = {"policy": "random", "kv_budget": 16, "interval": 4, "when": "always", "recycle": False, "regime": "fenced"}
LAZY = {"mode": "lazy", "low_watermark": 1.0, "cooldown_steps": 1, "theta_fragmentation": 0.1, "headroom": 0.1}


@pytest.fixture(autouse=True)
def on_fake_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    """Moves happen late, on a stream of their own."""
    monkeypatch.setattr(runner_module, "TorchKVStore", partial(TorchKVStore, make_copies=fake_stream_copies))


def moves_of(world: World) -> CUDACopyEngine:
    copies = world.runner.store.copies
    assert isinstance(copies, StreamedCopyEngine)
    return copies.moves


@pytest.mark.parametrize("mode", [{}, LAZY], ids=["fill", "evacuate"])
def test_moves_beside_the_forward_change_no_token_and_a_pass_has_one_launch(mode: dict[str, Any]) -> None:
    world = World(**FILL | mode)
    world.check(world.generate(PROMPTS, max_tokens=12))
    moving = [[plan for plan in report.plans if plan.moves] for report in world.reports]
    assert max(map(len, moving)) > 1, "no pass had moves of two requests"
    assert moves_of(world).num_launches == sum(map(bool, moving))
    assert moves_of(world).num_moves == world.engine.counters.num_moved_tokens > 0


def test_a_forward_that_does_not_wait_for_them_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StreamedCopyEngine, "wait", lambda self: None)
    world = World(**FILL)
    with pytest.raises(AssertionError):
        world.check(world.generate(PROMPTS, max_tokens=12))


def store_with_row(slots: Sequence[int], **sizes: int) -> tuple[HFRunner, TorchKVStore]:
    """A runner whose row 0 has positions 0, 1, ... at these slots of blocks of 4."""
    runner = HFRunner(tiny_model("llama"))
    runner.collect_mass(MassNeed())
    store = runner.make_store(runner.geometry.kv_spec(block_size=4, num_blocks=8, max_num_reqs=2))
    store.write(slots, range(len(slots)), bytes(len(slots) * store.spec.token_bytes))
    return runner, store


def test_a_choice_among_tokens_that_were_just_moved_knows_their_positions() -> None:
    runner, store = store_with_row([4, 5, 6, 7])
    book = runner._known_book()
    book.expect(0, 0, 4)
    book.add(torch.tensor([0]), torch.tensor([[3]]), torch.arange(4).unsqueeze(0), torch.tensor([[[4.0, 1, 3, 2]]]), 4)
    store.set_row(0, [1, 5], [0b0101, 0b0011])
    store.move([Move(1, 5, 20), Move(3, 7, 21)])
    assert list(runner.lowest(0, None, Choice(2, "mass", 1, ((0, 4),)))) == [1, 3]


def test_a_move_that_has_to_come_after_another_is_a_launch_of_its_own() -> None:
    _, store = store_with_row([4, 5, 6])
    for moves in ([Move(0, 4, 20)], [Move(1, 5, 21)], [Move(0, 20, 24)], [], [Move(2, 6, 5)]):
        store.move(moves)
    store.set_row(0, [1, 5, 6], [0b0010, 0b0010, 0b0001])
    assert store.read_row(0).positions == (2, 1, 0)
    copies = store.copies
    assert isinstance(copies, StreamedCopyEngine)
    assert (copies.moves.num_launches, copies.moves.num_moves) == (2, 4)


def test_tables_go_up_once_a_step_and_only_rows_with_another_block_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four requests decode eight tokens in blocks of four: each gets two blocks, and a token a step."""
    module = pytest.importorskip("vtoken_torch.hf.kernel_segment")
    monkeypatch.setattr(module, "paged_decode", lambda *args, out, **kwargs: out.zero_())
    engine = TorchEngine(HFRunner(tiny_model("llama"), decode_kernel=True), block_size=4, max_model_len=64)
    requests = [engine.submit(prompt(8, seed), SamplingParams(max_tokens=20)) for seed in range(4)]
    while not all(request.output for request in requests):
        engine.step()
    tables = engine.runner.store.tables
    tables.flush()
    before = tables.num_uploads, tables.num_rows_rebuilt, tables.num_incremental
    for _ in range(8):
        engine.step()
    after = tables.num_uploads, tables.num_rows_rebuilt, tables.num_incremental
    assert [new - old for new, old in zip(after, before, strict=True)] == [8, 8, 24]
