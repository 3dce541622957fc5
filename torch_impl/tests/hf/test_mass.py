import random
from math import isnan
from typing import Any

import pytest
import torch
from hf_world import World, prompt
from hypothesis import given, settings
from hypothesis import strategies as st

from vtoken.config import VTokenConfig
from vtoken.errors import SpecError
from vtoken.policies import MassNeed, RequestView, get_policy
from vtoken.policies.ranking import RankedPolicy
from vtoken_torch.hf.mass import MassBook
from vtoken_torch.hf.runner import HFRunner

EVERYTHING = {"kv_budget": 16, "interval": 4, "when": "always"}


def close(got: list[float], want: list[float]) -> None:
    assert [isnan(value) for value in got] == [isnan(value) for value in want]
    known = [value for value in want if not isnan(value)]
    assert [value for value in got if not isnan(value)] == pytest.approx(known, rel=1e-5, abs=1e-7)


@pytest.mark.parametrize(
    "config",
    [
        {"policy": "h2o"},
        {"policy": "h2o", "decay": 0.9},
        {"policy": "snapkv", "history": 5},
        {"policy": "scissorhands", "history": 6},
        {"policy": "h2o", "mode": "lazy", "low_watermark": 1.0, "cooldown_steps": 1, "theta_fragmentation": 0.1},
    ],
    ids=str,
)
def test_mass_equals_output_attentions(config: dict[str, Any]) -> None:
    world = World(**EVERYTHING | config)
    engine, runner = world.engine, world.runner
    requests = [engine.submit(prompt(length, length)) for length in (37, 9)]
    while len(requests[0].output) < 7:
        engine.step()
    assert engine.counters.num_evicted_tokens > 0
    need = engine.loop.scheduler.victims.policy.mass_need(engine.loop.config)
    for request in requests:
        table = engine.loop.pool.tables[request.req_id]
        live = [position for position in range(table.num_computed_tokens) if table.is_live(position)]
        mass, rows = runner.scores(engine.loop.pool.row_of(request.req_id), live)
        recorder = world.replay(request.index, [*request.prompt, *request.output], need).recorder
        want_mass, want_rows = recorder.scores(live)
        close(list(mass), want_mass)
        assert len(rows) == len(want_rows)
        for got, want in zip(rows, want_rows, strict=True):
            close(list(got), want)


def test_mass_of_all_queries_sums_to_queries_times_heads() -> None:
    world = World(policy="h2o", kv_budget=200, when="always")
    request = world.engine.submit(prompt(33))
    for _ in range(6):
        world.engine.step()
    row, count = world.engine.loop.pool.row_of(request.req_id), request.computed
    mass, _ = world.runner.scores(row, range(count))
    assert sum(mass) == pytest.approx(count * world.runner.geometry.num_query_heads, rel=1e-5)


def book_of(need: MassNeed, rng: random.Random, num_tokens: int, first: int) -> MassBook:
    """A book of two rows, the second a request that began at ``first`` and wrote its tokens in random steps."""
    book, start = MassBook(need, 2, torch.device("cpu")), first
    while start < num_tokens:
        count = min(rng.choice([1, 1, 3, 8]), num_tokens - start)
        kept = min(need.window, count) if need.window else 1
        positions = torch.arange(start + count)
        queries = positions[-kept:]
        masses = torch.tensor([[rng.choice([0.0, 0.25, rng.random()]) for _ in positions] for _ in range(kept)])
        masses = masses.masked_fill(positions > queries.unsqueeze(1), 0.0) if need.window else masses
        book.expect(1, start, count)
        book.add(torch.tensor([1]), queries.unsqueeze(0), positions.unsqueeze(0), masses.unsqueeze(0), count)
        start += count
    return book


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 1 << 30),
    name=st.sampled_from(["h2o", "tova", "snapkv", "scissorhands"]),
    smooth=st.sampled_from([None, 1, 3, 5]),
    recent=st.sampled_from([None, 0, 3]),
    protected=st.sampled_from([(), ((6, 9),), ((2, 5), (11, 12))]),
)
def test_the_device_chooses_what_the_host_would(
    seed: int, name: str, smooth: int | None, recent: int | None, protected: tuple[tuple[int, int], ...]
) -> None:
    rng = random.Random(seed)
    policy = get_policy(name)
    assert isinstance(policy, RankedPolicy)
    config = VTokenConfig(
        policy=name, kv_budget=12, num_sinks=2, smooth=smooth, recent=recent, protected=protected, history=5
    )
    num_tokens = rng.randint(14, 40)
    book = book_of(policy.mass_need(config), rng, num_tokens, rng.choice([0, 0, 4]))
    live = sorted(rng.sample(range(num_tokens), rng.randint(13, num_tokens)))
    mass, rows = book.scores(1, live)
    view = RequestView(num_tokens, 10, live, config, mass, rows)
    choice = policy.choice(view, len(live))
    assert choice is not None
    assert book.lowest(1, torch.tensor(live), choice) == list(policy.select_victims(view))


def test_a_forgotten_row_starts_at_zero() -> None:
    book = book_of(MassNeed(), random.Random(0), 20, 0)
    assert any(mass > 0 for mass in book.scores(1, range(20))[0])
    book.forget(1)
    assert all(isnan(mass) for mass in book.scores(1, range(20))[0])
    book.expect(1, 0, 1)
    book.add(torch.tensor([1]), torch.tensor([[0]]), torch.tensor([[0]]), torch.tensor([[[2.0]]]))
    assert book.scores(1, [0])[0] == [2.0]


def test_scores_without_collecting_is_an_error_that_names_the_remedy(llama: Any) -> None:
    runner = HFRunner(llama)
    with pytest.raises(SpecError, match="collect_mass"):
        runner.scores(0, [0])
