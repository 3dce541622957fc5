"""Triton's interpreter runs the kernel that a card would; PyTorch's indexing says what must come out."""

from functools import partial

import pytest
import torch
from kv_layouts import LAYOUTS, random_planes, raw

pytest.importorskip("triton", reason="PyTorch's builds for CPUs leave Triton out")

from triton_interpreter import interpreted

from vtoken.errors import InvariantError, SpecError
from vtoken_torch.copy_engine.cuda import CUDACopyEngine
from vtoken_torch.copy_engine.fake_device import FakeDevice
from vtoken_torch.kernels import move
from vtoken_torch.kernels.planes import KVPlanes, RowLayout
from vtoken_torch.kv_cache import KVCache

DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn, torch.uint8)
GARBAGE = 2**30


@pytest.fixture(autouse=True)
def in_the_interpreter(monkeypatch):
    monkeypatch.setattr(move, "move_kernel", interpreted(move.move_kernel))


def plan(num_moves, num_slots, dtype=torch.int32, seed=1):
    """Disjoint slots beyond the null block, and garbage behind them."""
    slots = torch.randperm(num_slots - 16, generator=torch.Generator().manual_seed(seed)) + 16
    rest = torch.full((5,), GARBAGE)
    src, dst = (torch.cat([part, rest]).to(dtype) for part in slots[: 2 * num_moves].view(2, num_moves))
    return src, dst, torch.tensor([num_moves], dtype=torch.int32)


def moved(planes, *arguments, by=None, **options):
    """The planes' bytes after a move in a copy of them. The strides are kept: a copy may have none of its own."""
    copies = [torch.empty_strided(v.shape, v.stride(), dtype=v.dtype).copy_(v) for v in map(as_bits, planes)]
    views = [copy.view(view.dtype) for copy, view in zip(copies, planes, strict=True)]
    (by or move.move_tokens)(KVPlanes.of(views), *arguments, **options)
    return raw(views)


def as_bits(view):
    return view.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[view.element_size()])


expected = partial(moved, by=move.move_tokens_reference)


@pytest.mark.parametrize(("num_heads", "content"), [(3, 16), (2, 20)], ids=["aligned", "odd"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("order", LAYOUTS)
def test_every_layout_and_dtype_moves_bit_for_bit(order, dtype, num_heads, content):
    planes = random_planes(order, dtype, 16, num_heads, content)
    src, dst, count = plan(11, 7 * 16)
    after = moved(planes, src, dst, count, num_programs=3)
    assert after == expected(planes, src, dst, count)
    assert after != raw(planes)


@pytest.mark.parametrize("num_programs", [None, 1, 2, 40])
def test_the_grid_changes_nothing(num_programs):
    planes = random_planes("LBHNC", torch.bfloat16, 16, 2, 64)
    src, dst, count = plan(23, 7 * 16, torch.int64)
    assert moved(planes, src, dst, count, num_programs=num_programs) == expected(planes, src, dst, count)


@pytest.mark.parametrize(("num_heads", "content"), [(8, 256), (1, 1), (1, 2047)], ids=["long", "one byte", "odd"])
def test_rows_longer_and_shorter_than_a_tile(num_heads, content):
    planes = random_planes("LBHNC", torch.uint8, 16, num_heads, content, num_layers=1)
    src, dst, count = plan(3, 7 * 16)
    assert moved(planes, src, dst, count) == expected(planes, src, dst, count)


def test_rows_of_several_aligned_tiles():
    planes = random_planes("BHLNC", torch.float32, 16, 5, 512, num_layers=2)  # 2560 words of 4 bytes
    src, dst, count = plan(3, 7 * 16)
    assert moved(planes, src, dst, count) == expected(planes, src, dst, count)


def test_no_move_at_all_changes_nothing():
    planes = random_planes("LBNHC", torch.float16, 16, 2, 32)
    assert moved(planes, *plan(0, 7 * 16)) == raw(planes)


@pytest.mark.parametrize("block_size", [1, 33, 64])
def test_any_block_size(block_size):
    planes = random_planes("LBHNC", torch.bfloat16, block_size, 2, 24)
    slots = torch.arange(6 if block_size == 1 else 60, dtype=torch.int32)
    src, dst = slots.view(2, -1)
    count = torch.tensor([len(src)], dtype=torch.int32)
    assert moved(planes, src, dst, count) == expected(planes, src, dst, count)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_cache_of_the_executor(make_spec, dtype):
    cache = KVCache(make_spec(dtype=dtype), torch.device("cpu"))
    cache.bits.random_()
    planes = KVPlanes.of_cache(cache)
    before = cache.bits.clone()
    move.move_tokens(planes, *(torch.tensor(slots, dtype=torch.int32) for slots in ([4, 9], [30, 21], [2])))
    assert torch.equal(cache.bits[:, [30, 21]], before[:, [4, 9]])
    untouched = [slot for slot in range(cache.spec.num_slots) if slot not in (30, 21)]
    assert torch.equal(cache.bits[:, untouched], before[:, untouched])


def test_the_copy_engine_launches_it_for_all_requests_at_once():
    views = random_planes("LBHNC", torch.bfloat16, 16, 2, 32)
    src, dst = [20, 97, 30, 41], [64, 17, 111, 65]
    wanted = expected(views, torch.tensor(src), torch.tensor(dst), torch.tensor([4]))
    device = FakeDevice()
    CUDACopyEngine(device, partial(move.move_tokens, KVPlanes.of(views))).launch(src, dst)
    device.finish()
    assert raw(views) == wanted


@pytest.mark.parametrize(
    ("src", "dst"),
    [([20, 30], [31, 20]), ([20, 30], [40, 40]), ([20], [20]), ([20, 30], [40])],
    ids=["a chain", "one target twice", "in place", "a source too many"],
)
def test_the_copy_engine_refuses_overlap_before_anything_moves(src, dst):
    views = random_planes("LBNHC", torch.bfloat16, 16, 2, 32)
    before = raw(views)
    device = FakeDevice()
    engine = CUDACopyEngine(device, partial(move.move_tokens, KVPlanes.of(views)))
    with pytest.raises(InvariantError, match="INV-5"):
        engine.launch(src, dst)
    device.finish()
    assert raw(views) == before


def test_a_chain_that_nobody_refused_comes_out_wrong():
    planes = random_planes("LBNHC", torch.bfloat16, 16, 3, 32)
    src = torch.arange(16, 40, dtype=torch.int32)
    count = torch.tensor([len(src)], dtype=torch.int32)
    assert moved(planes, src, src + 1, count, num_programs=3) != expected(planes, src, src + 1, count)


def test_a_lie_about_the_alignment_would_miss_bytes():
    """What the byte path is for: the words of 4 bytes in a row of 40 do not add up to strides of 16."""
    planes = random_planes("LBHNC", torch.bfloat16, 16, 2, 20)
    assert not KVPlanes.of(planes).is_aligned
    arguments = plan(11, 7 * 16)

    def lie(planes, *arguments):
        move.move_tokens(type(planes)(planes.table, planes.layout, 2, True, planes.views), *arguments)

    assert moved(planes, *arguments, by=lie) != expected(planes, *arguments)


def test_neighbouring_heads_are_one_run_and_others_are_not():
    of = {order: KVPlanes.of(random_planes(order, torch.bfloat16, 16, 2, 64)) for order in ("LBNHC", "LBHNC")}
    assert of["LBNHC"].layout == RowLayout(16, 1, 256, 16 * 256, 256, 0)
    assert of["LBHNC"].layout == RowLayout(16, 2, 128, 2 * 16 * 128, 128, 16 * 128)
    assert all(planes.is_aligned for planes in of.values())


def test_planes_that_layers_share_are_moved_once():
    first, second, _ = random_planes("LBNHC", torch.bfloat16, 16, 2, 8)
    assert KVPlanes.of([first, second, first]).distinct().table.tolist() == [first.data_ptr(), second.data_ptr()]


def test_a_plane_that_begins_off_a_multiple_of_16_goes_byte_by_byte():
    memory = torch.zeros(2 * 16 * 64 + 1, dtype=torch.float32)
    assert KVPlanes.of([memory[:-1].view(2, 16, 1, 64)]).is_aligned == (memory.data_ptr() % 16 == 0)
    assert KVPlanes.of([memory[1:].view(2, 16, 1, 64)]).is_aligned == ((memory.data_ptr() + 4) % 16 == 0)


@pytest.mark.parametrize(
    "views",
    [
        [],
        [torch.zeros(2, 4, 1, 8), torch.zeros(2, 4, 1, 4)],
        [torch.zeros(2, 4, 1, 8), torch.zeros(2, 4, 1, 8, dtype=torch.float16)],
        [torch.zeros(2, 4, 8)],
        [torch.zeros(2, 4, 8, 1).transpose(2, 3).expand(2, 4, 8, 8)[..., ::2]],
    ],
    ids=["none", "shapes", "dtypes", "dimensions", "content with gaps"],
)
def test_views_that_no_kernel_can_read_are_refused(views):
    with pytest.raises(SpecError, match=r"KV plane.*give"):
        KVPlanes.of(views)
