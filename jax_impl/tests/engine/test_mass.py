import numpy as np
import pytest

from vtoken.policies.base import MassNeed
from vtoken.policies.mass import MassRecorder
from vtoken.policies.ranking import Choice
from vtoken_jax.runner import JaxRunner

NEEDS = [MassNeed(decay=0.75), MassNeed(window=3), MassNeed(window=20, rows=True)]
PROMPT = [7, 3, 91, 14, 15, 92, 65, 35, 89, 79, 32, 38, 46, 26, 43, 38, 33, 27, 95, 2]
DEAD = {2: [], 20: [1, 5, 6], 22: [9]}  # count: positions that die before the next step


@pytest.fixture(scope="module")
def attention_rows(dense_llama):
    """Attention over the live tokens alone: rows of queries, summed over heads, mean over layers."""
    tokens = [*PROMPT, 11, 12, 13]
    hidden = np.zeros((len(tokens), len(tokens)), bool)
    for count, positions in DEAD.items():
        hidden[count:, positions] = True
    _, attention = dense_llama(tokens, hidden)
    return tokens, attention.sum(1).mean(0)


def run(driver, tokens):
    """The prompt in two chunks, then three decode steps, with deaths in between."""
    driver.admit("other")
    driver.admit("a")
    for start, end in ((0, 15), (15, 20), (20, 21), (21, 22), (22, 23)):
        driver.kill("a", DEAD.get(start, []))
        driver.step(("a", tokens[start:end]))
    return driver._rows["a"], driver.table_view("a").candidates()


@pytest.mark.parametrize("need", NEEDS, ids=str)
def test_scores_are_what_the_host_s_recorder_makes_of_a_dense_forward_s_attention(
    model_folders, make_driver, attention_rows, need
) -> None:
    tokens, rows = attention_rows
    driver = make_driver(JaxRunner.from_folder(model_folders("llama"), "float32"), need, num_blocks=24)
    row, live = run(driver, tokens)

    mass, mass_rows = driver.runner.scores(row, live)

    recorder = MassRecorder(need)
    for query in range(23):
        recorder.forget(DEAD.get(query, []))
        seen = [p for p in range(query + 1) if not any(p in dead and query >= at for at, dead in DEAD.items())]
        recorder.observe(seen, rows[query, seen].tolist())
    expected_mass, expected_rows = recorder.scores(live)
    np.testing.assert_allclose(mass, expected_mass, rtol=1e-4, atol=1e-5)
    assert len(mass_rows) == len(expected_rows)
    if mass_rows:
        np.testing.assert_allclose(mass_rows, expected_rows, rtol=1e-4, atol=1e-5)


def test_a_token_that_no_query_has_seen_has_no_mass(model_folders, make_driver) -> None:
    driver = make_driver(JaxRunner.from_folder(model_folders("llama"), "float32"), MassNeed(), num_blocks=24)
    driver.admit("a")
    assert np.isnan(driver.runner.scores(driver._rows["a"], [0, 1])[0]).all()
    assert driver.runner.lowest(driver._rows["a"], [0, 1], Choice(1, "mass", 1, ((0, 9),))) == []
    driver.step(("a", PROMPT[:15]))
    mass, _ = driver.runner.scores(driver._rows["a"], [0, 14, 15])
    assert np.isnan(mass).tolist() == [False, False, True]


def test_a_row_that_is_forgotten_starts_at_zero(model_folders, make_driver, attention_rows) -> None:
    tokens, rows = attention_rows
    driver = make_driver(JaxRunner.from_folder(model_folders("llama"), "float32"), MassNeed(), num_blocks=24)
    row, _ = run(driver, tokens)
    driver.runner.forget(row)
    driver.finish("a")
    driver.admit("b")
    assert driver._rows["b"] == row

    driver.step(("b", tokens[:15]))

    mass, _ = driver.runner.scores(row, range(15))
    np.testing.assert_allclose(mass, rows[:15, :15].sum(0), rtol=1e-4, atol=1e-5)


def brute(scores, positions, choice):
    """``Choice`` as its docstring says it, one token at a time."""
    known = {p: s for p, s in zip(positions, scores, strict=True) if s == s}
    half = choice.smooth // 2
    smooth = {p: np.mean([known[q] for q in known if abs(q - p) <= half]) for p in known}
    allowed = [p for p in known if any(low <= p < high for low, high in choice.spans)]
    return sorted(sorted(allowed, key=lambda p: (smooth[p], p))[: choice.count])


@pytest.mark.parametrize("smooth", [1, 7])
@pytest.mark.parametrize("need", [MassNeed(), MassNeed(window=20, rows=True)], ids=str)
def test_the_device_chooses_as_the_host_does(model_folders, make_driver, attention_rows, need, smooth) -> None:
    driver = make_driver(JaxRunner.from_folder(model_folders("llama"), "float32"), need, num_blocks=24)
    row, live = run(driver, attention_rows[0])
    mass, mass_rows = driver.runner.scores(row, live)
    scores = mass
    if need.rows:
        seen = [[m for m in masses if m == m] for masses in mass_rows]
        scores = [
            sum(masses[i] > np.mean(s) for masses, s in zip(mass_rows, seen, strict=True)) for i in range(len(live))
        ]
    for count, spans in (
        (5, ((0, 23),)),
        (30, ((2, 9), (12, 14))),
        (1, ()),
        (3, ((0, 4), (5, 9), (10, 13), (14, 15), (16, 40))),
    ):
        choice = Choice(count, "above_mean" if need.rows else "mass", smooth, spans)
        assert driver.runner.lowest(row, None, choice) == brute(scores, live, choice)
        assert driver.runner.lowest(row, live, choice) == brute(scores, live, choice)
    some = live[3:15]
    choice = Choice(4, "mass", smooth, ((0, 23),))
    assert driver.runner.lowest(row, some, choice) == brute(mass[3:15], some, choice)
