"""What a change may cost: the arrays stay where they are, and temporary memory grows with the tokens, not the pool."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from vtoken_jax import device_tables
from vtoken_jax.compaction import move_rows, move_tokens
from vtoken_jax.fingerprint import add_tokens, make_weights
from vtoken_jax.kv_cache import make_cache, storage_dtype, write_tokens
from vtoken_jax.model.abstract import trace_step
from vtoken_jax.model.config import ModelConfig
from vtoken_jax.native.operations import MOVE_ROWS, is_there

DTYPES = ["float32", "bfloat16"]  # one of each width: bits alone are stored
NATIVE_MOVE = pytest.param(
    "move_rows", marks=pytest.mark.skipif(not is_there(MOVE_ROWS), reason="no C++ compiler on this machine")
)


def arguments(spec, name, num_tokens):
    """The function ``name`` and its arguments, padded entries only: cost is the same."""
    cache, slots = make_cache(spec), np.full(num_tokens, spec.num_slots, np.int32)
    tables = device_tables.make_tables(spec)
    shape = (num_tokens, 2 * spec.num_layers, spec.num_kv_heads * spec.head_size)
    words = np.zeros((num_tokens, device_tables.words_per_block(spec.block_size)), np.uint32)
    row = np.zeros(spec.num_blocks - 1, np.int32), np.zeros(tables.live_words.shape[1], np.uint32)
    return {
        "write": (write_tokens, cache, slots, slots, np.zeros(shape, storage_dtype(spec.item_bytes))),
        "move": (move_tokens, cache, np.zeros_like(slots), slots),
        "move_rows": (move_rows, cache, slots, slots, np.int32(0)),
        "set_row": (device_tables.set_row, tables, 1, 2, *row),
        "set_words": (device_tables.set_words, tables, 1, slots, words),
        "set_free": (device_tables.set_free, tables, slots, True),
    }[name]


def pointers(state):
    return [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(state)]


def compiled(spec, name, num_tokens):
    function, *rest = arguments(spec, name, num_tokens)
    return function.lower(*rest).compile()


def temp_bytes(spec, name, num_tokens):
    return compiled(spec, name, num_tokens).memory_analysis().temp_size_in_bytes


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["write", "move", NATIVE_MOVE, "set_row", "set_words", "set_free"])
def test_a_change_happens_in_the_same_memory_and_consumes_the_old_arrays(make_spec, name, dtype):
    function, state, *rest = arguments(make_spec(dtype=dtype), name, 16)
    before = pointers(jax.block_until_ready(state))

    after = function(state, *rest)

    assert pointers(after) == before
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(state))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["write", "move", NATIVE_MOVE])
def test_every_array_of_the_pool_is_aliased_to_its_output(make_spec, name, dtype):
    spec = make_spec(dtype=dtype)
    program = compiled(spec, name, 16)

    pool_bytes = spec.num_slots * (spec.token_bytes + 4)
    assert program.memory_analysis().alias_size_in_bytes == pool_bytes
    header = program.as_text().split("\n", 1)[0]
    assert header.count("may-alias") + header.count("must-alias") == 2 * spec.num_layers + 1


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["write", "move"])
def test_temporary_memory_grows_with_the_tokens_and_not_with_the_pool(make_spec, name, dtype):
    small, large = (make_spec(dtype=dtype, block_size=16, num_blocks=num) for num in (64, 1024))

    few, many = temp_bytes(small, name, 16), temp_bytes(small, name, 256)

    assert few == temp_bytes(large, name, 16)
    assert many == temp_bytes(large, name, 256)
    assert few < many <= 3 * 256 * (small.token_bytes + 16)


@pytest.mark.skipif(not is_there(MOVE_ROWS), reason="no C++ compiler on this machine")
def test_compiled_moves_take_no_temporary_memory(make_spec):
    spec = make_spec(block_size=16, num_blocks=64)
    where_the_arrays_lie = 8 * (2 * spec.num_layers + 1)
    assert temp_bytes(spec, "move_rows", 16) == temp_bytes(spec, "move_rows", 4096) <= where_the_arrays_lie


def test_hashing_takes_temporary_memory_for_its_tokens_alone(make_spec):
    def temp(num_blocks, num_tokens):
        spec = make_spec(block_size=16, num_blocks=num_blocks)
        width = spec.num_kv_heads * spec.head_size
        weights = make_weights(num_planes=2 * spec.num_layers, width=width, item_bytes=spec.item_bytes)
        rest = np.zeros(num_tokens, np.int32), num_tokens
        lowered = add_tokens.lower(np.zeros(2, np.uint32), make_cache(spec), weights, *rest)
        return lowered.compile().memory_analysis().temp_size_in_bytes

    assert temp(64, 64) == temp(1024, 64)
    assert temp(1024, 64) < 4 * 64 * 256  # token_bytes = 256


@pytest.mark.parametrize("num_tokens", [1, 16])
def test_a_whole_step_appends_in_place_and_takes_memory_for_its_own_tokens(num_tokens):
    """Decode and prefill: KV is written, attended to and returned without a copy of any array of the pool."""
    model = ModelConfig(
        family="llama", vocab_size=32, hidden_size=16, intermediate_size=32, num_layers=2, num_query_heads=4,
        num_kv_heads=2, head_size=8, max_positions=256, rms_norm_eps=1e-5, rope_theta=1e4, tied_embeddings=True,
    )  # fmt: skip

    def step(num_blocks):
        traced = trace_step(model, "bfloat16", ((2, num_tokens),), num_blocks=num_blocks, width_blocks=4)
        return traced.lower().compile()

    small, large = step(64), step(1024)

    assert small.memory_analysis().temp_size_in_bytes == large.memory_analysis().temp_size_in_bytes
    header = large.as_text().split("\n", 1)[0]
    assert header.count("may-alias") + header.count("must-alias") == 2 * model.num_layers + 1


def test_the_checks_above_see_an_undonated_and_a_widened_copy(make_spec):
    """Controls: both are right in value, and cost the whole pool."""
    spec = make_spec(dtype="bfloat16", block_size=16, num_blocks=256)
    undonated = jax.jit(move_tokens.__wrapped__)
    slots = np.arange(16, dtype=np.int32)
    cache = make_cache(spec)
    assert pointers(undonated(cache, slots, slots + 16)) != pointers(cache)

    def widen(cache, src, dst):
        wide = jax.tree.map(lambda plane: plane.astype(jnp.uint32), cache)
        moved = jax.lax.optimization_barrier(move_tokens.__wrapped__(wide, src, dst))
        return jax.tree.map(lambda plane, old: plane.astype(old.dtype), moved, cache)

    program = jax.jit(widen, donate_argnums=0).lower(cache, slots, slots + 16).compile()
    assert program.memory_analysis().temp_size_in_bytes > spec.num_slots * spec.token_bytes / 2
