"""Decoding rows over whole blocks give what they give token by token, whatever lies behind their last token."""

from collections.abc import Sequence

import pytest
import torch
from hf_world import World, prompt

from vtoken.executor import KVSpec
from vtoken_torch.attention import attend_layer
from vtoken_torch.hf import plan
from vtoken_torch.hf.cache import PagedCache
from vtoken_torch.hf.segments import DecodeSegment, PackedSegment
from vtoken_torch.kv_store import TorchKVStore

BLOCK_SIZE = 4


def store_of(counts: Sequence[int]) -> TorchKVStore:
    """Rows without holes of so many tokens, in blocks in no order; NaN in all other slots."""
    spec = KVSpec(
        num_layers=2,
        num_kv_heads=2,
        num_query_heads=6,
        head_size=8,
        dtype="float32",
        block_size=BLOCK_SIZE,
        num_blocks=20,
        max_num_reqs=4,
    )
    store = TorchKVStore(spec, torch.device("cpu"))
    blocks = iter([7, 2, 11, 5, 19, 3, 14, 8, 1, 16])
    for row, count in enumerate(counts):
        words = [(1 << min(BLOCK_SIZE, count - first)) - 1 for first in range(0, count, BLOCK_SIZE)]
        store.set_row(row, [next(blocks) for _ in words], words)
    slots, _ = store.tables.find_live(range(len(counts)))
    for layer in range(spec.num_layers):
        for plane in (store.cache.keys(layer), store.cache.values(layer)):
            plane[slots] = torch.randn(len(slots), 2, 8, generator=torch.Generator().manual_seed(layer))
    return store


@pytest.mark.parametrize("counts", [(9, 3, 16), (5, 5, 5), (8,), (1, 4)], ids=str)
def test_whole_blocks_and_single_tokens_give_the_same(counts: tuple[int, ...]) -> None:
    store, rows = store_of(counts), range(len(counts))
    cache, queries = PagedCache(store.cache), torch.randn(6, len(counts), 8, generator=torch.Generator().manual_seed(9))
    packed = store.tables.find_blocks(rows)
    assert packed is not None
    by_block = PackedSegment(*packed, cache)
    for layer, kv in enumerate(cache.layer_kv):
        out = by_block.attend(queries, kv, 8**-0.5)
        slots, lens = store.tables.find_live(rows)
        by_token = DecodeSegment(rows, slots, lens, cache, torch.zeros(len(counts)), None)
        torch.testing.assert_close(out, by_token.attend(queries, kv, 8**-0.5))
        for row, live in enumerate(slots.split(lens)):
            rows_kv = (plane[live] for plane in (store.cache.keys(layer), store.cache.values(layer)))
            expected, _ = attend_layer(
                queries[:, row : row + 1].transpose(0, 1), *rows_kv, torch.ones(1, len(live)).bool()
            )
            torch.testing.assert_close(out[row], expected[0])


@pytest.mark.parametrize(("mode", "kind"), [("eager", "PackedSegment"), ("lazy", "DecodeSegment")])
def test_rows_with_holes_are_gathered_token_by_token_and_others_by_block(
    mode: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = []
    for name in ("PackedSegment", "DecodeSegment"):
        own = getattr(plan, name)
        monkeypatch.setattr(plan, name, lambda *args, own=own, name=name: made.append(name) or own(*args))
    world = World(policy="random", kv_budget=16, interval=4, when="always", mode=mode, low_watermark=0.0)
    world.check(world.generate([prompt(37), prompt(22, 1)], max_tokens=6))
    assert set(made[-3:]) == {kind}
