import jax
import jax.numpy as jnp
import numpy as np
import pytest

from vtoken_jax.model.tiles import as_tiles, product, row
from vtoken_jax.runner import JaxRunner


@pytest.mark.parametrize("num_tokens", [1, 2, 5])
@pytest.mark.parametrize(("num_out", "in_tiles"), [(64, True), (48, False)])
def test_tiles_multiply_and_are_looked_up_as_the_matrix_is(rng, num_tokens, num_out, in_tiles) -> None:
    weight = rng.standard_normal((num_out, 24)).astype(np.float32)
    x, picked = rng.standard_normal((num_tokens, 24)).astype(np.float32), rng.integers(0, num_out, num_tokens)
    tiles = jnp.asarray(as_tiles(weight))
    assert tiles.ndim == 2 + in_tiles
    np.testing.assert_allclose(product(jnp.asarray(x), tiles), x @ weight.T, rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(row(tiles, picked), weight[picked])


@pytest.mark.parametrize("form", [as_tiles, jnp.asarray])
def test_narrow_weights_are_added_in_float32(rng, form) -> None:
    weight, x = (jnp.asarray(rng.standard_normal((2, 4096)) + 8, jnp.bfloat16) for _ in range(2))
    got = product(x, jnp.asarray(form(np.repeat(weight, 16, axis=0))))
    exact = np.asarray(x, np.float64) @ np.repeat(np.asarray(weight, np.float64), 16, axis=0).T
    assert got.dtype == jnp.bfloat16
    np.testing.assert_allclose(np.asarray(got, np.float64), exact, rtol=2**-8)


@pytest.mark.parametrize("num_tokens", [1, 2, 8])
def test_a_narrow_matrix_is_not_widened_on_a_cpu(num_tokens) -> None:
    weight = jnp.zeros((512, 256), jnp.bfloat16)
    program = jax.jit(product).lower(jnp.zeros((num_tokens, 256), jnp.bfloat16), weight).compile()
    assert program.memory_analysis().temp_size_in_bytes < weight.nbytes / 8


@pytest.mark.parametrize(("dtype", "in_tiles"), [("float32", True), ("float16", True), ("bfloat16", False)])
def test_a_cpu_gets_the_form_that_it_multiplies_fastest(model_folders, dtype, in_tiles) -> None:
    runner = JaxRunner.from_folder(model_folders("llama"), dtype, device=jax.devices("cpu")[0])
    assert any(weight.ndim == 3 for weight in runner.weights) == in_tiles
