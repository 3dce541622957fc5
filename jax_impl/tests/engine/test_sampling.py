import jax.numpy as jnp
import numpy as np
import pytest

from vtoken.serving.protocol import SamplingParams
from vtoken_jax.sampling import make_draws, sample

LOGITS = np.random.default_rng(3).standard_normal((4, 50)).astype(np.float32)


def draw(rows, logits=LOGITS):
    draws, max_top_k = make_draws(rows)
    return np.asarray(sample(jnp.asarray(logits), draws, max_top_k)).tolist()


def test_greedy_rows_take_the_first_of_the_largest_logits_beside_rows_that_draw():
    logits = LOGITS.copy()
    logits[1, [7, 30]] = 9.0
    hot = (SamplingParams(temperature=1.0, seed=1), 0)
    assert make_draws([(SamplingParams(), 0), None]) == (None, 0)
    assert draw([hot, (SamplingParams(), 0), None, hot], logits)[1] == 7
    assert draw([(SamplingParams(), 0)] * 4, logits) == logits.argmax(-1).tolist()


def test_a_draw_depends_on_seed_and_index_and_on_no_other_row():
    def at(row, seed, index):
        rows = [(SamplingParams(temperature=5.0, seed=9), 3)] * 4
        rows[row] = (SamplingParams(temperature=5.0, seed=seed), index)
        return draw(rows, np.repeat(LOGITS[:1], 4, axis=0))[row]

    assert {at(row, 5, 2) for row in range(4)} == {at(0, 5, 2)}
    assert len({at(0, 5, index) for index in range(8)}) > 3
    assert len({at(0, seed, 0) for seed in (0, 1, 2, 1 << 32, 2 << 32, 1 << 63)}) > 3


@pytest.mark.parametrize("top_k", [1, 3])
def test_only_the_likeliest_are_drawn_and_each_of_them_is(top_k):
    likeliest = np.argsort(-LOGITS[0])[:top_k].tolist()
    wide = (SamplingParams(temperature=3.0, top_k=40), 0)
    found = {draw([(SamplingParams(temperature=3.0, top_k=top_k, seed=s), 0), wide], LOGITS[:2])[0] for s in range(40)}
    assert found == set(likeliest)


def test_frequencies_follow_the_softmax():
    logits = np.log(np.array([[0.7, 0.2, 0.1]], np.float32))
    found = draw(
        [(SamplingParams(temperature=1.0, seed=4), index) for index in range(2000)], np.repeat(logits, 2000, 0)
    )
    np.testing.assert_allclose(np.bincount(found, minlength=3) / 2000, [0.7, 0.2, 0.1], atol=0.05)
