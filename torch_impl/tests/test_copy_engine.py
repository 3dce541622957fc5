from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from vtoken.native.loader import compiler
from vtoken_torch.copy_engine import HostCopyEngine, IndexCopyEngine, make_copy_engine
from vtoken_torch.kv_cache import KVCache

# Signalling and quiet NaNs with payloads, both signs; infinities; minus zero; the smallest denormal.
HARD_BITS = {
    "float32": [0x7F800001, 0xFFA5A5A5, 0x7FC12345, 0x7F800000, 0xFF800000, 0x80000000, 0x00000001],
    "bfloat16": [0x7F81, 0xFFA5, 0x7FC5, 0x7F80, 0xFF80, 0x8000, 0x0001],
    "float16": [0x7C01, 0xFDA5, 0x7E35, 0x7C00, 0xFC00, 0x8000, 0x0001],
}
CPU = torch.device("cpu")


class NumpyCopyEngine(HostCopyEngine):
    """The host engine where no compiler is."""

    def __init__(self, cache):
        super().__init__(cache)
        self._native = None


@pytest.fixture(params=[HostCopyEngine, NumpyCopyEngine, IndexCopyEngine])
def engine_type(request):
    return request.param


def hard_tokens(spec, num_tokens, seed=0):
    """Token bytes, each element one of the bit patterns that float copies may change."""
    item = np.dtype(f"u{spec.item_bytes}")
    patterns = np.array(HARD_BITS[spec.dtype], dtype=item)
    draw = np.random.default_rng(seed).integers(len(patterns), size=(num_tokens, spec.token_elements))
    return [row.tobytes() for row in patterns[draw]]


def read(engine, spec, slots):
    data = bytes(engine.read(torch.tensor(slots, dtype=torch.int64)))
    return [data[i * spec.token_bytes : (i + 1) * spec.token_bytes] for i in range(len(slots))]


@pytest.mark.parametrize("head_size", [8, 1])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a_move_keeps_every_bit_and_touches_nothing_else(make_spec, engine_type, dtype, head_size):
    spec = make_spec(dtype=dtype, head_size=head_size, num_kv_heads=1)
    engine = engine_type(KVCache(spec, CPU))
    tokens = hard_tokens(spec, spec.num_slots)
    engine.write(range(spec.num_slots), b"".join(tokens))
    src, dst = [4, 9, 17, 30], [31, 5, 8, 16]
    engine.move(src, dst)
    for source, target in zip(src, dst, strict=True):
        tokens[target] = tokens[source]
    assert read(engine, spec, range(spec.num_slots)) == tokens


@pytest.mark.parametrize("buffer", [bytes, bytearray, memoryview])
def test_tokens_are_read_in_the_order_asked_for(make_spec, engine_type, buffer):
    spec = make_spec(dtype="bfloat16")
    engine = engine_type(KVCache(spec, CPU))
    tokens = hard_tokens(spec, 3)
    engine.write([20, 6, 13], buffer(b"".join(tokens)))
    assert read(engine, spec, [13, 20, 6]) == [tokens[2], tokens[0], tokens[1]]


def test_reading_no_token_gives_no_byte(make_spec, engine_type):
    assert bytes(engine_type(KVCache(make_spec(), CPU)).read(torch.empty(0, dtype=torch.int64))) == b""


def test_the_cpu_gets_the_host_engine(make_spec):
    assert isinstance(make_copy_engine(KVCache(make_spec(), CPU)), HostCopyEngine)


@pytest.mark.parametrize("host_type", [HostCopyEngine, NumpyCopyEngine])
@pytest.mark.parametrize("moves", [([4, 9], [31, 32]), ([4, -1], [31, 5]), ([4, 9], [31, -1])])
def test_a_slot_outside_the_pool_is_refused_and_nothing_is_moved(make_spec, host_type, moves):
    spec = make_spec(num_blocks=8, block_size=4)
    engine = host_type(KVCache(spec, CPU))
    tokens = hard_tokens(spec, spec.num_slots)
    engine.write(range(spec.num_slots), b"".join(tokens))
    with pytest.raises(IndexError, match=f"move 1 from slot {moves[0][1]} to {moves[1][1]} leaves the 32 slots"):
        engine.move(*moves)
    assert read(engine, spec, range(spec.num_slots)) == tokens


def test_many_engines_move_at_once_each_its_own(make_spec):
    """Compiled moves run side by side: the interpreter's lock is let go meanwhile."""
    spec = make_spec(num_blocks=32, block_size=16, head_size=64)
    half = spec.num_slots // 2

    def moved_about(seed):
        engine, tokens = HostCopyEngine(KVCache(spec, CPU)), hard_tokens(spec, half, seed)
        engine.write(range(half), b"".join(tokens))
        for turn in range(20):
            low, high = range(half), range(half, 2 * half)
            engine.move(*((low, high[::-1]) if turn % 2 == 0 else (high, low)))
        return read(engine, spec, range(half)) == tokens

    with ThreadPoolExecutor(6) as pool:
        assert all(pool.map(moved_about, range(6)))


def test_where_a_compiler_is_host_moves_are_compiled(make_spec):
    assert (HostCopyEngine(KVCache(make_spec(), CPU))._native is None) == (compiler() is None)
