import pytest

from vtoken.config import VTokenConfig
from vtoken.errors import InvariantError, SpecError
from vtoken.trace import TraceEvent
from vtoken_bench.simulation.engine import Run, Sample, Workload
from vtoken_bench.simulation.study import VARIANTS, Outcome, Study

# The paper's Figure 9 request, 4032 + 12288 tokens in 5427 blocks, at an eighth of its size.
EIGHTH = Workload(prompt=504, output=1536, block_size=16, pool_blocks=678, chunk=256)
SMALL = Workload(prompt=60, output=100, block_size=4, pool_blocks=100, chunk=32)


def config(policy: str = "h2o", **changes: object) -> VTokenConfig:
    options = {"eviction_ratio": 0.5, "interval": 16, "when": "always", **changes}
    if policy == "none":
        del options["eviction_ratio"]
    return VTokenConfig.from_mapping({"policy": policy, **options})


def recorded(study: Study) -> list[TraceEvent]:
    study.alone("naive")
    return study._trace.events[0]


@pytest.fixture(scope="module")
def outcomes() -> dict[str, Outcome]:
    return dict(Study(config(interval=64), EIGHTH).outcomes())


def test_packing_doubles_the_requests_that_fit(outcomes: dict[str, Outcome]) -> None:
    most = {name: outcome.max_requests for name, outcome in outcomes.items()}

    assert most.pop("lazy") in (7, 8)
    assert most == {"native": 5, "naive": 5, "fill": 10, "vtoken": 10}


def test_variants_hold_what_the_design_says_of_them(outcomes: dict[str, Outcome]) -> None:
    final = {name: outcome.alone.samples[-1].held_blocks for name, outcome in outcomes.items()}
    ideal = outcomes["vtoken"].alone.samples[-1].ideal_blocks

    assert final["native"] == 128  # 2040 tokens
    assert ideal <= final["vtoken"] <= ideal + 1
    assert ideal <= final["fill"] <= ideal + 1
    assert ideal < final["lazy"] < 0.8 * final["naive"] < final["native"]


def test_eager_mode_copies_a_fraction_of_what_fill_alone_copies(outcomes: dict[str, Outcome]) -> None:
    copies = {name: outcome.alone.copies for name, outcome in outcomes.items()}

    assert copies["native"] == copies["naive"] == 0
    assert 0 < copies["vtoken"] < copies["fill"] / 8


def test_every_variant_runs_until_one_request_more_is_refused(outcomes: dict[str, Outcome]) -> None:
    for outcome in outcomes.values():
        assert outcome.frontier is not None
        assert outcome.frontier.fits
        assert len(outcome.frontier.survivors) == outcome.max_requests
        assert "blocks are needed" in outcome.refusal


@pytest.mark.parametrize(
    "policy",
    ["h2o", "random", "streaming_llm", "sliding_window", "scissorhands", "tova", "snapkv", "paged_eviction", "none"],
)
def test_all_variants_evict_the_same_tokens_as_the_trace_says(policy: str) -> None:
    study = Study(config(policy), SMALL)
    survivors = {name: study.alone(name).survivors for name in VARIANTS}
    alive = set(range(SMALL.total))
    for event in study._trace.events[0]:
        at_once = len(set(event.died)) == 1
        alive -= {
            victim
            for victim, count in zip(event.chosen, event.died, strict=True)
            if count < SMALL.total or (at_once and count == SMALL.total)
        }

    assert survivors.pop("native") == [frozenset(range(SMALL.total))]
    assert all(survivor == [frozenset(alive)] for survivor in survivors.values())
    assert (len(alive) < SMALL.total) == (policy != "none")


def test_a_seed_gives_the_same_victims_again_and_another_seed_gives_others() -> None:
    assert recorded(Study(config(), SMALL)) == recorded(Study(config(), SMALL))
    assert recorded(Study(config(), SMALL)) != recorded(Study(config(seed=1), SMALL))
    assert recorded(Study(config("random"), SMALL)) != recorded(Study(config("random", seed=1), SMALL))


@pytest.mark.parametrize("policy", ["h2o", "random"])
def test_requests_of_one_study_have_victims_of_their_own(policy: str) -> None:
    study = Study(config(policy), SMALL)
    study.together("vtoken", 2)

    first, second = ([event.chosen for event in study._trace.events[key]] for key in (0, 1))
    assert first != second


def test_victims_depend_on_neither_pool_nor_block_size() -> None:
    other = Workload(prompt=60, output=100, block_size=16, pool_blocks=40, chunk=32)

    assert recorded(Study(config(), SMALL)) == recorded(Study(config(), other))


def test_a_fixed_budget_needs_no_copy_in_decode() -> None:
    workload = Workload(prompt=32, output=400, block_size=4, pool_blocks=200, chunk=32)
    run = Study(VTokenConfig(policy="h2o", kv_budget=64, interval=16, when="always"), workload).alone("vtoken")

    assert run.counters.num_recycled_tokens > 300
    assert run.copies == 0


@pytest.mark.parametrize(("capacity", "guess"), [(3, 7), (7, 3), (5, 5), (0, 2), (1, 1), (90, 2), (1, 50)])
def test_the_search_finds_the_last_number_that_fits_from_either_side(
    monkeypatch: pytest.MonkeyPatch, capacity: int, guess: int
) -> None:
    study = Study(config(), SMALL)
    tried: list[int] = []

    def together(_: str, num_requests: int) -> Run:
        tried.append(num_requests)
        return Run(refusal="" if num_requests <= capacity else "full")

    monkeypatch.setattr(study, "together", together)
    alone = Run(samples=[Sample(1, SMALL.pool_blocks // guess, 1)])
    outcome = study._searched("native", alone)

    assert outcome.max_requests == capacity
    assert outcome.refusal == "full"
    assert (outcome.frontier is None) == (capacity == 0)
    assert len(tried) == len(set(tried)) <= 14


def test_a_pool_too_small_for_one_request_is_refused_at_once() -> None:
    tiny = Workload(prompt=60, output=100, block_size=4, pool_blocks=5, chunk=32)

    with pytest.raises(SpecError, match="the pool has 5: lower its budget or its length, or give the pool more blocks"):
        Study(config(), tiny)


def test_a_variant_that_evicts_other_tokens_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    study = Study(config(), SMALL)
    honest = study.alone

    def alone(name: str) -> Run:
        run = honest(name)
        if name == "fill":
            run.survivors = [frozenset({0})]
        return run

    monkeypatch.setattr(study, "alone", alone)
    with pytest.raises(InvariantError, match="fill evicted other tokens than naive"):
        dict(study.outcomes())
