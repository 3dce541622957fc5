"""Mass kept by packed index, against the spec's recorder: random layouts, moves, recycled slots, holes, questions."""

import random
from array import array

import numpy as np
import pytest

from vtoken.config import VTokenConfig
from vtoken.errors import InvariantError
from vtoken.policies import Choice, MassNeed, MassRecorder, RequestView, smoothed
from vtoken.policies.ranking import times_above_mean

CONFIG = VTokenConfig(policy="h2o", kv_budget=1)
NEEDS = [
    MassNeed(),
    MassNeed(decay=0.5),
    MassNeed(window=1),
    MassNeed(window=4),
    MassNeed(window=7, rows=True),
]


class _Twin:
    """One request, its mass kept twice. ``layout``: the position at each packed index, -1 in a hole."""

    def __init__(self, need, seed, num_cached=0):
        import torch

        from vtoken_torch.vllm_plugin.mass.kept import KeptMass

        self.draw, self.numbers = random.Random(seed), np.random.default_rng(seed)
        self.need, self.recorder = need, MassRecorder(need)
        self.kept = KeptMass(need, num_cached, torch.device("cpu"))
        self.layout, self.count = list(range(num_cached)), num_cached
        self.dead = set()

    @property
    def live(self):
        return [position for position in self.layout if position >= 0 and position not in self.dead]

    def step(self, num_new, is_scored):
        """Appends, goes over a dead token, or is told a new layout."""
        start, self.count = self.count, self.count + num_new
        new, victims = list(range(start, self.count)), self.live
        way = self.draw.choice(["append", "append", "recycle", "plan"]) if len(victims) > 3 else "append"
        if way == "recycle" and num_new == 1:
            place = self.layout.index(self.draw.choice(victims))
            self.recorder.forget([self.layout[place]])
            self.layout[place] = start
            self.kept.write(place, start, 1)
        elif way == "plan":
            gone = set(self.draw.sample(victims, self.draw.randrange(3)))
            self.recorder.forget(gone)
            self.layout = [position for position in victims if position not in gone]
            self.draw.shuffle(self.layout)
            for _ in range(self.draw.choice([0, 0, 2])):
                self.layout.insert(self.draw.randrange(len(self.layout)), -1)
            self.layout += new
            self.kept.rearrange(array("i", self.layout), self.count)
        else:
            self.kept.write(len(self.layout), start, num_new)
            self.layout += new
        if is_scored:
            self._score(num_new)

    def mark(self):
        """A token dies in its place, as in lazy mode."""
        victim = self.draw.choice(self.live)
        self.dead.add(victim)
        self.recorder.forget([victim])

    def _score(self, num_new):
        import torch

        is_live = np.array([position >= 0 and position not in self.dead for position in self.layout])
        rows = np.tril(self.numbers.random((num_new, len(is_live)), dtype=np.float32), len(is_live) - num_new) * is_live
        seen = np.array(self.layout)[is_live].tolist()
        if self.need.window:
            told = rows[-self.need.window :]
            for query, row in zip(range(self.count - num_new, self.count), rows[:, is_live], strict=True):
                pairs = [(position, mass) for position, mass in zip(seen, row, strict=True) if position <= query]
                self.recorder.observe([position for position, _ in pairs], [float(mass) for _, mass in pairs])
        else:
            told = rows.sum(0, keepdims=True)
            self.recorder.observe_sum(seen, told[0][is_live].tolist(), num_new)
        self.kept.add(torch.from_numpy(told), num_new, self.count)

    def holes(self):
        """Indices without a live token."""
        import torch

        found = [place for place, position in enumerate(self.layout) if position < 0 or position in self.dead]
        return torch.tensor(found, dtype=torch.int64) if found else None


@pytest.mark.parametrize("need", NEEDS, ids=str)
@pytest.mark.parametrize("is_lazy", [False, True], ids=["packed", "holes"])
def test_masses_are_those_of_a_recorder_that_knows_no_layout(need, is_lazy):
    from vtoken_torch.vllm_plugin.mass.orders import Question

    for seed in range(8):
        twin = _Twin(need, seed, num_cached=seed)
        for number in range(40):
            twin.step(twin.draw.choice([1, 1, 1, 5]), is_scored=number == 0 or twin.draw.random() < 0.7)
            if is_lazy and twin.draw.random() < 0.3 and len(twin.live) > 2:
                twin.mark()
            if twin.draw.random() < 0.3:
                doomed = sorted(twin.draw.sample(twin.live, twin.draw.randrange(2)))
                candidates = sorted(set(twin.live) - set(doomed))
                found = twin.kept.answer(Question(None, doomed), twin.holes())
                mass, rows = twin.recorder.scores(candidates)
                assert found.positions.tolist() == candidates
                np.testing.assert_allclose(found.mass, mass, rtol=1e-12)
                assert len(found.rows) == len(rows)
                for got, wanted in zip(found.rows, rows, strict=True):
                    np.testing.assert_array_equal(got, wanted)


@pytest.mark.parametrize("score", ["mass", "above_mean"])
@pytest.mark.parametrize("smooth", [1, 5])
def test_victims_are_the_hosts_choice_lowest_first(score, smooth):
    from vtoken_torch.vllm_plugin.mass.orders import Question

    num_named = 0
    for seed in range(12):
        twin = _Twin(MassNeed(window=6, rows=True), seed)
        for _ in range(50):
            twin.step(twin.draw.choice([1, 1, 4]), is_scored=twin.draw.random() < 0.9)
        view_of = RequestView(twin.count, 1, sorted(twin.live), CONFIG, *twin.recorder.scores(sorted(twin.live)))
        scores = times_above_mean(view_of) if score == "above_mean" else view_of.mass
        scores = smoothed(view_of, scores, smooth)
        spans = ((3, twin.count // 2), (twin.count // 2 + 4, twin.count - 2))
        may_die = [
            (each, position)
            for each, position in zip(scores, view_of.live_positions, strict=True)
            if each == each and any(low <= position < high for low, high in spans)
        ]
        for count in (1, 4, 500):
            found = twin.kept.answer(Question(Choice(count, score, smooth, spans), ()), twin.holes()).tolist()
            if smooth == 1:
                assert found == [position for _, position in sorted(may_die)[:count]]
            else:  # sums come in another order, so that ties may differ
                near = {position: each for each, position in may_die}
                wanted = sorted(each for each, _ in may_die)[:count]
                np.testing.assert_allclose([near[position] for position in found], wanted, rtol=1e-9)
            num_named += len(found)
    assert num_named > 100


def test_a_layout_that_does_not_fit_is_refused():
    import torch

    from vtoken_torch.vllm_plugin.mass.kept import KeptMass

    kept = KeptMass(MassNeed(), 4, torch.device("cpu"))
    with pytest.raises(InvariantError, match="attention mass: 1 tokens at 5 of a layout of 4"):
        kept.write(5, 4, 1)
    with pytest.raises(InvariantError, match="attention mass: 3 tokens at 2 of a layout of 4"):
        kept.write(2, 4, 3)
    with pytest.raises(InvariantError, match="attention mass of 5 tokens for a layout of 4"):
        kept.add(torch.ones(1, 5), 1, 5)
