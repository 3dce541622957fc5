"""The kernel, in Triton's interpreter, gives the integers of the spec."""

import pytest
import torch
from kv_layouts import LAYOUTS, random_planes

pytest.importorskip("triton", reason="PyTorch's builds for CPUs leave Triton out")

from triton_interpreter import interpreted

import vtoken.fingerprint as spec
from vtoken_torch.fingerprint import token_fingerprints
from vtoken_torch.kernels import fingerprint
from vtoken_torch.kernels.planes import KVPlanes
from vtoken_torch.kv_cache import KVCache

DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn)


@pytest.fixture(autouse=True)
def in_the_interpreter(monkeypatch):
    monkeypatch.setattr(fingerprint, "fingerprint_kernel", interpreted(fingerprint.fingerprint_kernel))


def keys_and_values(planes):
    """In canonical order."""
    return [half for plane in planes for half in plane.chunk(2, dim=3)]


def scattered(num_tokens, num_slots, num_requests, seed=0):
    """Slots, positions and requests in no order."""
    generator = torch.Generator().manual_seed(seed)
    slots = torch.randperm(num_slots, generator=generator)[:num_tokens].int()
    positions = torch.randperm(100_000, generator=generator)[:num_tokens].int()
    return slots, positions, torch.randint(0, num_requests, (num_tokens,), generator=generator).int()


def canonical(views, slot):
    """One token's bytes as the spec takes them: one-byte elements are zero-extended."""
    size = views[0].shape[1]
    kv = torch.cat([view[slot // size, slot % size].reshape(-1).view(torch.uint8) for view in views])
    one_byte = views[0].element_size() == 1
    return (kv.to(torch.int16).view(torch.uint8) if one_byte else kv).numpy().tobytes()


def in_hex(low, high):
    return f"{high:08x}{low:08x}"


EVERY = [
    (order, dtype, *[(2, 32), (3, 20)][(i + j) % 2])
    for i, order in enumerate(LAYOUTS)
    for j, dtype in enumerate(DTYPES)
]


@pytest.mark.parametrize(("order", "dtype", "num_heads", "content"), EVERY, ids=str)
def test_every_layout_and_dtype_gives_the_integers_of_the_spec(order, dtype, num_heads, content):
    views = keys_and_values(random_planes(order, dtype, 16, num_heads, content, num_layers=2))
    slots, positions, requests = scattered(7, 7 * 16, 3)
    tokens, sequences = fingerprint.fingerprint_tokens(KVPlanes.of(views), slots, positions, requests, 3)

    kv = [canonical(views, slot) for slot in slots.tolist()]
    assert list(zip(*tokens.tolist(), strict=True)) == [spec.token_fingerprint(each) for each in kv]
    of_request = [
        [
            (position, each)
            for position, each, r in zip(positions.tolist(), kv, requests.tolist(), strict=True)
            if r == request
        ]
        for request in range(3)
    ]
    assert [in_hex(*halves) for halves in sequences.T.tolist()] == list(map(spec.sequence_fingerprint, of_request))


@pytest.mark.parametrize("content", [2, 514, 2048])
def test_rows_of_any_length_are_those_of_the_reference(content):
    planes = KVPlanes.of(keys_and_values(random_planes("LBHNC", torch.float32, 16, 2, content, num_layers=1)))
    arguments = (*scattered(5, 7 * 16, 2), 2)
    got = fingerprint.fingerprint_tokens(planes, *arguments)
    wanted = fingerprint.fingerprint_tokens_reference(planes, *arguments)
    assert all(map(torch.equal, got, wanted))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_the_cache_of_the_executor_gives_what_plain_torch_gives(make_spec, dtype):
    cache = KVCache(make_spec(dtype=dtype, num_layers=3), torch.device("cpu"))
    cache.bits.random_()
    slots = torch.tensor([30, 4, 9, 21, 17])
    tokens, _ = fingerprint.fingerprint_tokens(KVPlanes.of_cache(cache), slots, slots, torch.zeros_like(slots), 1)
    assert torch.equal(tokens, token_fingerprints(cache, slots))


def test_order_does_not_matter_and_positions_and_single_bits_do():
    views = keys_and_values(random_planes("LBNHC", torch.bfloat16, 16, 2, 16, num_layers=1))
    slots, positions, requests = scattered(7, 7 * 16, 1)

    def sequence(order, positions=positions):
        planes = KVPlanes.of(views)
        (low, high) = fingerprint.fingerprint_tokens(planes, slots[order], positions[order], requests, 1)[1].tolist()
        return low, high

    as_they_are = torch.arange(7)
    before = sequence(as_they_are)
    assert sequence(as_they_are.flip(0)) == before
    assert sequence(as_they_are, positions.flip(0)) != before
    block, slot = divmod(int(slots[3]), 16)
    views[-1].view(torch.int16)[block, slot, 1, 7] ^= 1 << 14
    changed = sequence(as_they_are)
    assert all(new != old for new, old in zip(changed, before, strict=True))


def test_no_token_at_all_and_a_request_without_tokens_are_zero():
    planes = KVPlanes.of(random_planes("LBNHC", torch.bfloat16, 16, 2, 16))
    none = torch.zeros(0, dtype=torch.int32)
    tokens, sequences = fingerprint.fingerprint_tokens(planes, none, none, none, 2)
    assert tokens.shape == (2, 0)
    assert sequences.tolist() == [[0, 0], [0, 0]]
    one = torch.tensor([17], dtype=torch.int32)
    _, sequences = fingerprint.fingerprint_tokens(planes, one, one, torch.tensor([1]), 3)
    assert [column.count_nonzero().item() for column in sequences.T] == [0, 2, 0]
