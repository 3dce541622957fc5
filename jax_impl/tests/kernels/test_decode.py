"""Every implementation of decode attention that runs here, against the reference; all lower for CUDA."""

from functools import lru_cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax_decode_world import assert_close, make_world

from vtoken.errors import SpecError
from vtoken_jax import compat
from vtoken_jax.kernels import decode as decode_module
from vtoken_jax.kernels import decode_triton, decode_xla
from vtoken_jax.kernels.decode import choose, paged_decode, reference_decode

TRITON = partial(decode_triton.decode, interpret=True)


@pytest.fixture
def run(monkeypatch):
    """``paged_decode`` with mass, by an implementation given as a function."""

    def run(world, implementation):
        monkeypatch.setitem(decode_module._DECODES, "xla", implementation)
        function = partial(paged_decode.__wrapped__, with_mass=True, implementation="xla", **world.static)
        return jax.jit(function)(*world.arguments)

    return run


def check(run, implementation, world, dtype=None):
    out, mass = run(world, implementation)
    expected, expected_mass = world.expected()
    assert (out.dtype, mass.dtype) == (jnp.float32, jnp.float32)
    assert_close(out, expected, dtype or world.kv_dtype)
    assert_close(mass, expected_mass, "float32")
    assert not np.asarray(mass)[~world.live].any()


SHAPES = {
    "gqa_3_bfloat16": {"heads": (9, 3), "head_size": 64, "kv_dtype": "bfloat16"},
    "gqa_3_float16": {"heads": (9, 3), "head_size": 64, "kv_dtype": "float16"},
    "gqa_3_float32": {"heads": (9, 3), "head_size": 64},
    "mha_6": {"heads": (6, 6), "head_size": 32},
    "mqa_float16": {"heads": (4, 1), "head_size": 128, "kv_dtype": "float16"},
    "head_size_80": {"heads": (4, 2), "head_size": 80, "kv_dtype": "bfloat16"},
    "head_size_8": {"heads": (4, 2), "head_size": 8},
    "block_1": {"block_size": 1, "held": (40, 7)},
    "block_33": {"block_size": 33, "held": (3, 1)},
    "block_128": {"block_size": 128, "held": (2, 1), "kv_dtype": "bfloat16"},
    "full_table": {"max_blocks": 4, "held": (4, 4)},
    "all_live": {"live_share": 1.1},
}
DEPRECATED = pytest.mark.filterwarnings("ignore:The Pallas Triton backend:DeprecationWarning")  # jax 0.11 and later
BOTH = pytest.mark.parametrize("implementation", [decode_xla.decode, TRITON], ids=["xla", "triton"])


@BOTH
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_every_shape_agrees_with_float64_and_dead_nan_never_leaks(run, implementation, shape):
    check(run, implementation, make_world(**shape))


@pytest.fixture(scope="module")
def compiled():
    """One compiled call for each implementation and number of programs that share a context."""

    @lru_cache
    def compiled(name, num_parts):
        decode = decode_xla.decode if name == "xla" else partial(TRITON, num_parts=num_parts)
        return jax.jit(partial(decode, **random_world(0).static))

    return compiled


def random_world(seed):
    rng = np.random.default_rng(seed)
    held = tuple(rng.integers(0, 13, 3).tolist())
    return make_world(
        heads=(2, 1), block_size=16, held=held, max_blocks=12, pool_blocks=40, live_share=float(rng.random()) ** 2,
        magnitude=3.0, seed=seed,
    )  # fmt: skip


@pytest.mark.parametrize("seed", range(16))
@pytest.mark.parametrize(("name", "num_parts"), [("xla", 1), ("triton", 1), ("triton", 3), ("triton", 7)])
def test_random_layouts_agree_however_many_programs_share_a_context(compiled, name, num_parts, seed):
    world = random_world(seed)
    out, logits, lse = (np.asarray(part) for part in compiled(name, num_parts)(*world.arguments))
    expected, expected_mass = world.expected()
    assert_close(out, expected, "float32")
    live = world.live[:, None]
    weights = np.exp(np.where(live, logits, -np.inf) - np.where(live.any(-1), lse, 0.0)[..., None])
    assert_close(weights.sum(axis=1), expected_mass, "float32")


@BOTH
def test_a_request_without_a_live_token_gives_zeros_and_no_mass(run, implementation):
    world = make_world(held=(2, 0, 3))
    world.live[0] = False
    out, mass = run(world, implementation)
    assert not np.asarray(out)[:2].any()
    assert not np.asarray(mass)[:2].any()
    assert_close(out, world.expected()[0], "float32")


@BOTH
def test_what_dead_slots_hold_changes_no_bit_of_the_result(run, implementation):
    world = make_world(held=(5, 2), kv_dtype="bfloat16")
    first = run(world, implementation)
    for plane in world.planes:
        plane[np.isnan(plane.astype(np.float32))] = 1e30
    second = run(world, implementation)
    for before, after in zip(first, second, strict=True):
        assert np.asarray(before).tobytes() == np.asarray(after).tobytes()


@BOTH
def test_live_bits_past_the_held_blocks_count_for_nothing(run, implementation):
    world = make_world(held=(3, 2))
    world.table[1, 2:] = world.table[0, :2]
    world.live[1, 2 * world.block_size :] = True
    out, mass = run(world, implementation)
    world.live[1, 2 * world.block_size :] = False
    expected, expected_mass = world.expected()
    assert_close(out, expected, "float32")
    assert_close(mass, expected_mass, "float32")


@BOTH
def test_a_float32_query_over_a_narrow_pool_is_computed_in_float32(run, implementation):
    world = make_world(kv_dtype="bfloat16", q_dtype="float32", held=(6, 2))
    check(run, implementation, world, dtype="float32")


@BOTH
@pytest.mark.parametrize("plane", [0, 1], ids=["key", "value"])
def test_a_live_nan_spoils_its_own_request_and_kv_head_alone(run, implementation, plane):
    world = make_world(heads=(4, 2), held=(3, 2), live_share=1.1)
    world.planes[plane][world.slots[0, 5], :16] = np.nan
    out = np.asarray(run(world, implementation)[0])
    assert np.isnan(out[0, :2]).all()
    assert np.isfinite(out[0, 2:]).all()
    assert np.isfinite(out[1]).all()


def test_the_reference_is_softmax_over_the_live_tokens_alone():
    """Worked out by hand: two KV heads of one element, blocks of two; slots 2 and 5 live, and slot 2's keys are 0."""
    q = np.array([[[1.0], [2.0], [1.0], [-1.0]]], np.float32)
    keys, values = np.full((2, 8, 2), np.nan, np.float32)
    keys[[2, 5]], values[[2, 5]] = [[0, 0], [np.log(3), np.log(9)]], [[4, 40], [8, 80]]
    table, words = np.array([[2, 1, 3]]), np.array([[0b10, 0b01, 0b11]], np.uint32)
    static = {"scale": 0.5, "kv_dtype": "float32", "num_kv_heads": 2, "block_size": 2}
    bits = keys.view(np.uint32), values.view(np.uint32)

    out, mass = reference_decode(q, *bits, table, np.array([2]), words, **static)

    share = np.array([3**0.5 / (1 + 3**0.5), 3 / 4, 3 / 4, 1 / 4])  # of slot 5
    np.testing.assert_allclose(out[0, :, 0], (1 + share) * [4, 4, 40, 40], rtol=1e-6)
    np.testing.assert_allclose(mass, [[0, share.sum(), 4 - share.sum(), 0, 0, 0]], rtol=1e-6)


def test_the_check_sees_a_leak(run):
    """Control: values that are weighted by zero, and not dropped, spread their NaN."""

    def leaking(q, k_plane, v_plane, table, num_blocks, words, **static):
        out, logits, lse = decode_xla.decode(q, k_plane, v_plane, table, num_blocks, words, **static)
        values = jax.lax.bitcast_convert_type(v_plane, jnp.dtype(static["kv_dtype"]))
        return out + 0.0 * jnp.sum(values), logits, lse

    with pytest.raises(AssertionError):
        check(run, leaking, make_world())


def test_xla_reads_the_rows_it_needs_and_not_the_pool():
    def temp_bytes(spare):
        world = make_world(held=(4, 4))
        planes = [jax.ShapeDtypeStruct((len(plane) * spare, plane.shape[1]), plane.dtype) for plane in world.bits]
        q, _, _, *rest = world.arguments
        program = paged_decode.lower(q, *planes, *rest, with_mass=True, implementation="xla", **world.static).compile()
        return program.memory_analysis().temp_size_in_bytes

    assert temp_bytes(1) == temp_bytes(64)


def lowered(implementation, **shape):
    world = make_world(**shape)
    traced = paged_decode.trace(*world.arguments, with_mass=True, implementation=implementation, **world.static)
    return traced.lower(lowering_platforms=("cuda",)).as_text()


@pytest.fixture
def h100():
    gpu = jax.sharding.AbstractDevice(device_kind="NVIDIA H100 80GB HBM3", num_cores=None, platform="gpu")
    with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((1,), ("gpu",), abstract_device=gpu)):
        yield


@DEPRECATED
@pytest.mark.usefixtures("h100")
@pytest.mark.parametrize("kv_dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("implementation", "call"), [("triton", "triton"), ("mosaic", "mosaic_gpu"), ("xla", "")])
def test_every_implementation_lowers_for_cuda_without_a_card(implementation, call, kv_dtype):
    text = lowered(implementation, heads=(9, 3), head_size=64, kv_dtype=kv_dtype)
    calls = [line for line in text.splitlines() if "custom_call" in line]
    assert call in "".join(calls)
    assert bool(calls) == bool(call)


@DEPRECATED
@pytest.mark.usefixtures("h100")
def test_the_lowering_refuses_what_no_card_can_run():
    """Control: Triton's blocks are powers of two."""
    from jax.experimental import pallas as pl

    def double(a, out):
        out[...] = a[...] * 2

    shape = jax.ShapeDtypeStruct((48,), jnp.float32)
    call = pl.pallas_call(double, out_shape=shape, **compat.triton_params(num_warps=4))
    with pytest.raises(Exception, match="power of 2"):
        jax.jit(call).trace(shape).lower(lowering_platforms=("cuda",))


def test_a_shape_that_the_mosaic_kernel_cannot_take_is_refused_with_the_remedy():
    with pytest.raises(SpecError, match=r"block_size=33: it must be a multiple of 8: use implementation='triton'"):
        choose("mosaic", kv_dtype="bfloat16", head_size=64, block_size=33)
    with pytest.raises(SpecError, match=r"head_size=24 in bfloat16"):
        choose("mosaic", kv_dtype="bfloat16", head_size=24, block_size=16)
    with pytest.raises(SpecError, match=r"implementation='cudnn' is unknown: use one of auto, xla, triton, mosaic"):
        choose("cudnn", kv_dtype="bfloat16", head_size=64, block_size=16)


@pytest.mark.parametrize(
    ("backend", "is_maintained", "block_size", "chosen"),
    [
        ("cpu", False, 16, "xla"),
        ("tpu", False, 16, "xla"),
        ("gpu", True, 16, "triton"),
        ("gpu", False, 16, "mosaic"),
        ("gpu", False, 33, "xla"),
    ],
)
def test_auto_takes_the_kernel_that_this_jax_maintains(monkeypatch, backend, is_maintained, block_size, chosen):
    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    monkeypatch.setattr(compat, "TRITON_IS_MAINTAINED", is_maintained)
    assert choose("auto", kv_dtype="bfloat16", head_size=64, block_size=block_size) == chosen
