import importlib.util
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
from decode_world import ALL_DEAD, LAYOUTS, PADDING, Shape, World, make_world, oracle, worst
from triton_interpreter import interpreted

from vtoken_torch.device_tables import DeviceTables
from vtoken_torch.kernels import decode, decode_kernels
from vtoken_torch.kernels.decode_tile import Tile
from vtoken_torch.kernels.decode_workspace import DecodeWorkspace
from vtoken_torch.kv_cache import KVCache

KERNELS = ("split_kernel", "reduce_kernel", "mass_kernel")
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2**-7, torch.float16: 2**-10}  # of the largest value (SPEC A-4)
SHAPES = [
    Shape(2, 1, 64, 16, 4),
    Shape(2, 2, 32, 16, 3),
    Shape(4, 2, 128, 16, 2),
    Shape(3, 1, 80, 32, 2),
    Shape(1, 1, 96, 64, 1),
    Shape(2, 1, 256, 128, 1),
    Shape(2, 1, 40, 24, 2),
]
MANY_HEADS = Shape(17, 1, 32, 16, 2)  # of one KV head: more than one program
CUTS = [(1, Tile(32)), (3, Tile(16)), (2, Tile(64)), (2, Tile(32))]  # splits and tiles, in turn
CASES = [
    pytest.param(shape, dtype, layout, *CUTS[index % len(CUTS)], id=f"{'-'.join(map(str, shape))}-{dtype}-{layout}")
    for index, (layout, shape, dtype) in enumerate(
        [*product(LAYOUTS, SHAPES, TOLERANCE), *product(["NHD"], [MANY_HEADS], TOLERANCE)]
    )
]


@pytest.fixture(scope="module", autouse=True)
def kernels_run(device):
    """On the CPU, in Triton's interpreter."""
    with pytest.MonkeyPatch.context() as patch:
        if device.type == "cpu":
            for name in KERNELS:
                patch.setattr(decode, name, interpreted(getattr(decode_kernels, name)))
        yield


def poisoned_workspace(world: World, num_splits: int, tile: Tile) -> DecodeWorkspace:
    heads, max_tokens = world.shape[:3], world.shape.block_size * world.shape.max_blocks
    workspace = DecodeWorkspace(
        6, *heads, max_tokens, world.q.device, with_logits=True, num_splits=num_splits, tile=tile
    )
    for scratch in (workspace.parts, workspace.part_lse, workspace.lse, workspace.logits):
        scratch.fill_(torch.nan)
    return workspace


def attend(world: World, workspace: DecodeWorkspace, *, with_logits: bool = True) -> torch.Tensor:
    out = torch.full_like(world.q, torch.nan)
    logits = workspace.logits if with_logits else None
    decode.paged_decode(*world.tensors, scale=world.scale, out=out, workspace=workspace, logits=logits)
    return out


def check(world: World, num_splits: int, tile: Tile) -> None:
    """Output, log-sum-exp and mass against the oracle."""
    workspace = poisoned_workspace(world, num_splits, tile)
    out = attend(world, workspace)
    num_reqs = len(world.q)
    before = torch.arange(world.alive.size, dtype=torch.float32, device=world.q.device).view(num_reqs, -1) % 3
    mass = before.clone()
    decode.token_mass(workspace.logits, workspace.lse, world.num_blocks, mass, block_size=world.shape.block_size)

    expected_out, expected_lse, expected_mass = oracle(world)
    assert worst(out, expected_out) <= TOLERANCE[world.q.dtype]
    assert worst(workspace.lse[:num_reqs], expected_lse) <= 1e-5
    assert worst(mass.double() - before, expected_mass) <= 1e-5
    dead = ~torch.from_numpy(world.alive).view(num_reqs, -1).to(mass.device)
    assert torch.equal(mass[dead], before[dead])
    assert workspace.lse[num_reqs:].isnan().all()  # another batch's rows


@pytest.mark.parametrize(("shape", "dtype", "layout", "num_splits", "tile"), CASES)
def test_output_lse_and_mass_are_those_of_the_live_tokens_alone(device, shape, dtype, layout, num_splits, tile):
    world = make_world(shape, dtype, layout, device, seed=len(layout))
    check(world, num_splits, tile)


@pytest.mark.parametrize("layout", ["planes", "HND"])
@pytest.mark.parametrize("shape", [*SHAPES, MANY_HEADS], ids=str)
def test_the_reference_is_exact_in_float64(device, shape, layout):
    world = make_world(shape, torch.float16, layout, device, seed=3)
    got = decode.reference_decode(*world.tensors, scale=world.scale, dtype=torch.float64)
    assert max(map(worst, got, oracle(world))) <= 1e-12


def test_nothing_alive_and_padding_give_zeros(device):
    world = make_world(SHAPES[0], torch.bfloat16, "NHD", device, seed=5)
    workspace = poisoned_workspace(world, 2, Tile(16))
    out = attend(world, workspace)
    for row in (PADDING, ALL_DEAD):
        assert not out[row].any()
        assert torch.isneginf(workspace.lse[row]).all()


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_without_logits_the_output_has_the_same_bits_and_no_logit_is_written(device, dtype):
    world = make_world(SHAPES[0], dtype, "HND", device, seed=6)
    workspace = poisoned_workspace(world, 2, Tile(32))
    out = attend(world, workspace, with_logits=False)
    assert workspace.logits.isnan().all()
    assert torch.equal(out, attend(world, workspace))
    assert not workspace.logits[0, :, : world.shape.block_size].isnan().any()


def test_with_fixed_splits_a_request_does_not_depend_on_its_batch(device):
    world = make_world(SHAPES[2], torch.float32, "NHD", device, seed=7)
    workspace = poisoned_workspace(world, 3, Tile(16))
    batch = attend(world, workspace)
    for row in range(len(batch)):
        q, keys, values, *tables = world.tensors
        out = torch.empty_like(q[:1])
        rows = (table[row : row + 1] for table in tables)
        decode.paged_decode(q[row : row + 1], keys, values, *rows, scale=world.scale, out=out, workspace=workspace)
        assert torch.equal(out[0], batch[row])


def test_a_launch_leaves_nothing_for_the_next(device):
    """Workspaces are shared by layers and steps; the batch shrinks and grows."""
    first, second = (make_world(SHAPES[1], torch.float32, "NHD", device, seed=seed) for seed in (8, 9))
    workspace = poisoned_workspace(first, 2, Tile(32))
    fresh = attend(second, poisoned_workspace(second, 2, Tile(32)))
    attend(first, workspace)
    assert torch.equal(attend(second, workspace), fresh)


def test_automatic_splits_and_tiles_agree_with_the_oracle(device):
    world = make_world(SHAPES[2], torch.float32, "NHD", device, seed=10)
    check(world, None, None)


def test_tables_and_pool_of_the_torch_executor_are_read_as_they_are(device, make_spec):
    spec = make_spec(num_query_heads=6, num_kv_heads=2, head_size=32, block_size=40, num_blocks=6)
    cache, tables = KVCache(spec, device), DeviceTables(spec, device)
    words = (1 << 39 | 1 << 32 | 1 << 31 | 1, 0b1011 << 20)
    tables.set_row(0, (4, 2), words)
    tables.set_row(1, (2,), (1 << 21,))
    slots = [*tables.live_slots(0).tolist(), *tables.live_slots(1).tolist()]
    for rows in (cache.keys(1), cache.values(1)):
        rows[slots] = torch.randn(len(slots), 2, 32, device=device)
    pool = [rows.view(-1, 40, 2, 32) for rows in (cache.keys(1), cache.values(1))]
    q = torch.randn(spec.max_num_reqs, 6, 32, device=device)
    out = torch.empty_like(q)
    width = tables.block_table.shape[1]
    workspace = DecodeWorkspace(spec.max_num_reqs, 6, 2, 32, width * 40, device, num_splits=1)
    arguments = (q, *pool, tables.block_table, tables.num_blocks, tables.live_words)
    decode.paged_decode(*arguments, scale=0.2, out=out, workspace=workspace)
    expected, lse, _ = decode.reference_decode(*arguments, scale=0.2)
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(workspace.lse, lse)
    assert out[:2].abs().min() > 0
    assert not out[2:].any()


# -- mutants ---------------------------------------------------------------------------------------------------------

MUTANTS = {  # what is wrong: the line of the kernels, and what stands there instead
    "dead values are read": (
        "value = tl.load(values + row[:, None] + dim[None, :], mask=readable, other=0.0)",
        "value = tl.load(values + row[:, None] + dim[None, :], mask=in_blocks[:, None] & in_head, other=0.0)",
    ),
    "dead tokens count": ("score = tl.where(alive[None, :], score, -float('inf'))", ""),
    "live words by block id": ("index * words_per_block", "block * words_per_block"),
    "one live word for a block": ("slot // 32", "slot // 64"),
    "values at the keys' strides": ("block * v_block + slot * v_slot", "block * k_block + slot * k_slot"),
    "interleaved query heads": ("kv_head * group_size + member", "member * num_kv_heads + kv_head"),
    "no scale": (" * scale\n", "\n"),
    "a dead tile is not guarded": ("shift = tl.where(peak == -float('inf'), 0.0, peak)", "shift = peak"),
    "output not shrunk": ("acc = acc * shrink[:, None]", "acc = acc"),
    "sum not shrunk": ("total = total * shrink", "total = total"),
    "last tile left out": (
        "last = num_tiles * (split + 1) // num_splits",
        "last = (num_tiles - 1) * (split + 1) // num_splits",
    ),
    "splits weigh the same": ("weight = tl.exp(logs - shift)", "weight = tl.exp(logs - logs)"),
    "parts that were not written are read": (
        "written = (logs > -float('inf'))[:, None]",
        "written = (split < num_splits)[:, None]",
    ),
    "mass without lse": ("tl.exp(score - log_sum[:, None])", "tl.exp(score)"),
    "mass not added": ("before + paid", "paid"),
    "mass of the first tile alone": ("num_tokens, tl.num_programs(0) * token_tile", "token_tile, token_tile"),
}


@pytest.fixture(scope="module")
def source():
    return Path(decode_kernels.__file__).read_text().replace('-float("inf")', "-float('inf')")


@pytest.mark.filterwarnings("ignore:All-NaN slice encountered")  # a mutant may read what lies beyond a table
@pytest.mark.parametrize("fault", MUTANTS)
def test_the_check_sees(fault, device, source, tmp_path, monkeypatch):
    right, wrong = MUTANTS[fault]
    assert source.count(right) == 1
    file = tmp_path / "mutant.py"
    file.write_text(source.replace(right, wrong))
    spec = importlib.util.spec_from_file_location("mutant", file)
    mutant = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(mutant)
    for name in KERNELS:
        kernel = getattr(mutant, name)
        monkeypatch.setattr(decode, name, interpreted(kernel) if device.type == "cpu" else kernel)
    world = make_world(Shape(4, 2, 32, 64, 2), torch.float32, "keys NHD, values HND", device, seed=11)
    with np.errstate(all="ignore"), pytest.raises(AssertionError):
        check(world, 2, Tile(32))
