import math

import pytest

from vtoken.policies import MassNeed
from vtoken_bench.simulation.synthetic import SyntheticScores

CUMULATED = MassNeed()
ROWS = MassNeed(window=4, rows=True)


def test_cumulated_mass_is_the_tokens_weight_times_the_log_of_its_age() -> None:
    scores = SyntheticScores(CUMULATED, max_tokens=4000, seed=1)
    positions = list(range(4000))

    old, _ = scores(0, positions[:2000])
    new, rows = scores(0, positions)

    for position in (500, 1000, 1999):
        grown = math.log(4000 / (position + 1)) / math.log(2000 / (position + 1)) if position < 1999 else None
        if grown:
            assert new[position] / old[position] == pytest.approx(grown, rel=0.01)
    assert rows == []


def test_mass_decays_by_the_need() -> None:
    faded = SyntheticScores(MassNeed(decay=0.5), max_tokens=8, seed=1)(0, range(8))[0]
    whole = SyntheticScores(CUMULATED, max_tokens=8, seed=1)(0, range(8))[0]
    paid = [1 / count for count in range(1, 9)]

    for position in range(8):
        queries = range(position, 8)  # the query at position q has q + 1 computed tokens
        ratio = sum(paid[q] * 0.5 ** (7 - q) for q in queries) / sum(paid[q] for q in queries)
        assert faded[position] / whole[position] == pytest.approx(ratio)


def test_every_token_has_mass_from_its_own_query_on() -> None:
    mass, _ = SyntheticScores(CUMULATED, max_tokens=100, seed=0)(0, range(100))

    assert all(value > 0 for value in mass)


def test_a_scores_depend_on_seed_request_and_position_never_on_who_else_is_live() -> None:
    scores = SyntheticScores(CUMULATED, max_tokens=64, seed=5)
    everyone, _ = scores(3, range(64))
    few, _ = SyntheticScores(CUMULATED, max_tokens=64, seed=5)(3, [0, 7, 63])

    assert few == [everyone[0], everyone[7], everyone[63]]
    assert scores(4, range(64))[0] != everyone
    assert SyntheticScores(CUMULATED, max_tokens=64, seed=6)(3, range(64))[0] != everyone


def test_a_window_gives_the_last_rows_with_nan_where_the_query_came_before_the_token() -> None:
    mass, rows = SyntheticScores(ROWS, max_tokens=64, seed=0)(0, range(10))

    assert [sum(map(math.isnan, row)) for row in rows] == [3, 2, 1, 0]
    assert all(math.isnan(value) for value in rows[0][7:])
    for column, total in enumerate(mass):
        assert total == pytest.approx(sum(row[column] for row in rows if not math.isnan(row[column])))


def test_a_window_longer_than_the_request_starts_at_its_first_token() -> None:
    _, rows = SyntheticScores(MassNeed(window=16, rows=True), max_tokens=64, seed=0)(0, range(3))

    assert len(rows) == 3


def test_a_sum_over_a_window_needs_no_rows() -> None:
    mass, rows = SyntheticScores(MassNeed(window=4), max_tokens=64, seed=0)(0, range(10))

    assert rows == []
    assert mass == SyntheticScores(ROWS, max_tokens=64, seed=0)(0, range(10))[0]
