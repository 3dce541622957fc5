"""The Mosaic kernels in JAX's GPU interpreter, which watches for races; 0.10.2 has none, ``make aot`` runs this."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu
from jax_decode_world import assert_close, make_world

from vtoken_jax import compat
from vtoken_jax.kernels import decode as decode_module
from vtoken_jax.kernels import decode_mosaic
from vtoken_jax.kernels.decode import paged_decode

pytestmark = pytest.mark.skipif(
    compat.mosaic_interpreter() is None, reason=f"jax {jax.__version__} has no GPU interpreter"
)


@pytest.fixture
def run(monkeypatch):
    def run(world, **options):
        decode = partial(decode_mosaic.decode, interpret=compat.mosaic_interpreter(), **options)
        monkeypatch.setitem(decode_module._DECODES, "xla", decode)
        function = partial(paged_decode.__wrapped__, with_mass=True, implementation="xla", **world.static)
        return jax.jit(function)(*world.arguments)

    return run


def check(run, world, **options):
    out, mass = run(world, **options)
    expected, expected_mass = world.expected()
    assert_close(out, expected, "float32")  # sums are float32, whatever the pool holds
    assert_close(mass, expected_mass, "float32")


SHAPES = {
    "gqa_3_bfloat16": {"heads": (9, 3), "head_size": 64, "kv_dtype": "bfloat16", "held": (5, 2)},
    "gqa_4_float16": {"heads": (8, 2), "head_size": 128, "kv_dtype": "float16"},
    "mha_float32": {"heads": (2, 2), "head_size": 32, "kv_dtype": "float32"},
    "block_8": {"block_size": 8, "held": (11, 3)},
    "block_128": {"block_size": 128, "held": (2, 1)},
    "block_24": {"block_size": 24, "held": (4, 1)},
    "head_size_80": {"heads": (2, 1), "head_size": 80, "kv_dtype": "bfloat16"},
    "hardly_any": {"live_share": 0.03, "held": (6, 2)},
}


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_mosaic_agrees_with_float64_and_dead_nan_never_leaks(run, shape):
    check(run, make_world(**shape))


@pytest.mark.parametrize("options", [{"num_parts": 3}, {"sum_columns": 16}], ids=str)
def test_the_split_of_the_work_changes_nothing(run, options):
    check(run, make_world(held=(9, 0, 4)), **options)


def test_a_request_without_a_live_token_gives_zeros_and_no_mass(run):
    world = make_world(held=(2, 0, 3))
    world.live[0] = False
    out, mass = run(world)
    assert not np.asarray(out)[:2].any()
    assert not np.asarray(mass)[:2].any()
    assert_close(out, world.expected()[0], "float32")


def test_the_check_sees_a_leak(run, monkeypatch):
    """Control: dead slots that pass for live ones spread their NaN."""
    monkeypatch.setattr(decode_mosaic, "live_tokens", lambda words, *_: jnp.ones((len(words), 48), bool))
    with pytest.raises(AssertionError):
        check(run, make_world(held=(2, 2)))


@pytest.mark.skipif(compat.VERSION < (0, 12), reason="older interpreters print races and go on")
def test_the_interpreter_sees_a_race(run, monkeypatch):
    """Control: a tile is read while its copy is under way."""
    with monkeypatch.context() as broken:
        broken.setattr(mosaic_gpu, "barrier_wait", lambda barrier: None)
        with pytest.raises(Exception, match="RACE DETECTED"):
            check(run, make_world(held=(2, 1)))
    check(run, make_world(held=(2, 1)))
