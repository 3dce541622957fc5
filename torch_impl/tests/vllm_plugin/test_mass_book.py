"""The book of masses alone: rows that wait for a question tell what rows read at once tell."""

import random
from array import array

import numpy as np
import pytest

from vtoken.policies import MassNeed, MassRecorder


def _steps(draw, num_steps):
    """(packed positions, masses of all queries, number of queries, what dies before the next step)."""
    live, count = [], 0
    for _ in range(num_steps):
        num_new = draw.choice([1, 1, 1, 5])
        if num_new == 1 and len(live) > 3:
            dead = [live.pop(draw.randrange(len(live))) for _ in range(draw.randrange(3))]
        else:
            dead = []
        draw.shuffle(live)
        live += range(count, count + num_new)
        count += num_new
        rows = np.tril(np.random.default_rng(count).random((num_new, len(live)), dtype=np.float32), len(live) - num_new)
        yield dead, array("i", live), rows, count


@pytest.mark.parametrize(
    "need", [MassNeed(), MassNeed(decay=0.5), MassNeed(window=1), MassNeed(window=4), MassNeed(window=7, rows=True)]
)
def test_the_book_says_what_a_recorder_says_that_is_told_all_at_once(need):
    from vtoken_torch.vllm_plugin.mass.book import RequestMass

    for seed in range(20):
        draw = random.Random(seed)
        mass, recorder = RequestMass(need), MassRecorder(need)
        for dead, positions, rows, count in _steps(draw, 30):
            mass.forget(dead)
            recorder.forget(dead)
            mass.expect(len(rows))
            if need.window:
                mass.take(positions, rows[-need.window :], len(rows), count)
                for query, row in enumerate(rows):
                    seen = len(positions) - len(rows) + query + 1
                    recorder.observe(positions[:seen], row[:seen].tolist())
            else:
                mass.take(positions, rows.sum(0, keepdims=True), len(rows), count)
                recorder.observe_sum(positions, rows.sum(0).tolist(), len(rows))
            assert (mass.num_known, mass.num_chunks_under_way) == (count, 0)
            if draw.random() < 0.3:
                live = sorted(positions)
                np.testing.assert_allclose(mass.scores(live)[0], recorder.scores(live)[0], rtol=1e-6)
                np.testing.assert_array_equal(mass.scores(live)[1], recorder.scores(live)[1])


def test_a_token_that_died_before_its_mass_came_leaves_nothing():
    from vtoken_torch.vllm_plugin.mass.book import RequestMass

    mass = RequestMass(MassNeed())
    mass.expect(3)
    mass.forget([1])
    assert mass.num_chunks_under_way == 1
    mass.take(array("i", [0, 1, 2]), np.ones((1, 3), np.float32), 3, 3)
    assert mass.scores([0, 2]) == ([1.0, 1.0], [])
    assert sorted(mass._recorder._columns) == [0, 2]
