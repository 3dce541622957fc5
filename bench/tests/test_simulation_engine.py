from collections.abc import Iterable

import pytest

from vtoken.config import VTokenConfig
from vtoken.errors import SpecError
from vtoken.policies import get_policy
from vtoken.trace import TraceEvent, VictimTrace
from vtoken.types import cdiv
from vtoken.victims import PolicyVictims, TraceVictims
from vtoken_bench.simulation.engine import Engine, Run, Workload
from vtoken_bench.simulation.study import variant_configs

SMALL = Workload(prompt=50, output=150, block_size=4, pool_blocks=100, chunk=32)
CONFIGS = variant_configs(VTokenConfig(policy="random", eviction_ratio=0.5, interval=16, when="always"))


def run(variant: str, workload: Workload, num_requests: int = 1, events: Iterable[TraceEvent] = ()) -> Run:
    config = CONFIGS[variant]
    if not events:
        victims = PolicyVictims(config, get_policy(config.policy))
        return Engine(config, workload, victims, range(num_requests)).run()
    trace = VictimTrace()
    for event in events:
        trace.add(event)
    return Engine(config, workload, TraceVictims(trace), range(num_requests)).run()


def test_native_holds_a_block_for_every_block_size_tokens() -> None:
    samples = run("native", SMALL).samples

    assert [sample.computed_tokens for sample in samples] == [32, 50, *range(51, 201)]
    assert all(sample.held_blocks == sample.ideal_blocks == cdiv(sample.computed_tokens, 4) for sample in samples)


@pytest.mark.parametrize("variant", ["fill", "vtoken"])
def test_a_packed_variant_holds_the_ideal_and_at_most_one_block_more_once_chunks_are_over(variant: str) -> None:
    decoding = [sample for sample in run(variant, SMALL).samples if sample.computed_tokens > SMALL.prompt]

    assert len(decoding) == SMALL.output
    assert all(0 <= sample.held_blocks - sample.ideal_blocks <= 1 for sample in decoding)


def test_recycling_spares_copies() -> None:
    fill, vtoken = run("fill", SMALL), run("vtoken", SMALL)

    assert vtoken.counters.num_recycled_tokens > 50
    assert vtoken.copies < fill.copies / 2


def test_naive_gives_a_block_back_when_its_last_token_dies_and_moves_nothing() -> None:
    dead_block = TraceEvent(0, 50, (4, 5, 6, 7), (50,) * 4)
    scattered = TraceEvent(0, 66, (8, 12, 16, 20), (66, 67, 68, 69))

    last = run("naive", SMALL, events=[dead_block, scattered]).samples[-1]

    assert (last.held_blocks, last.ideal_blocks) == (49, 48)


def test_copies_are_counted_by_pass() -> None:
    events = [TraceEvent(0, 50, (0, 1, 2), (50,) * 3)]

    filled = run("fill", SMALL, events=events)

    assert (filled.copies, filled.worst_step_copies) == (1, 1)  # the first block keeps one token, which leaves it


def test_requests_start_one_behind_the_other_and_share_the_pool() -> None:
    both = run("native", SMALL, num_requests=2)

    assert both.fits
    assert both.peak_blocks == 100
    assert [both.samples[index].computed_tokens for index in (0, 1, 2, -1)] == [32, 50, 51 + 32, 200]
    assert len(both.samples) == 2 + 150 + 2  # the second starts when the first has its prompt, two passes later


def test_a_pool_that_runs_out_says_so_and_stops() -> None:
    three = run("native", SMALL, num_requests=3)

    assert not three.fits
    assert "0 of 100 are free" in three.refusal
    assert three.survivors == []


def test_a_request_that_must_wait_for_another_to_end_does_not_fit() -> None:
    workload = Workload(prompt=40, output=4, block_size=4, pool_blocks=19, chunk=40)

    assert run("native", workload, num_requests=2).refusal == "a request ended before the last one could start"


def test_a_request_that_never_fits_is_refused_with_both_numbers() -> None:
    refusal = run("native", Workload(prompt=50, output=150, block_size=4, pool_blocks=49)).refusal

    assert "needs 50 blocks" in refusal
    assert "the pool has 49" in refusal


def test_a_request_longer_than_the_pool_runs_where_its_live_tokens_fit() -> None:
    workload = Workload(prompt=50, output=150, block_size=4, pool_blocks=40, chunk=32)

    assert not run("native", workload).fits
    assert run("vtoken", workload).fits


@pytest.mark.parametrize("key", ["prompt", "output", "block_size", "pool_blocks", "chunk"])
def test_a_workload_of_nothing_is_refused(key: str) -> None:
    sizes = {"prompt": 1, "output": 1, "block_size": 1, "pool_blocks": 1, "chunk": 1, key: 0}

    with pytest.raises(SpecError, match=f"{key}=0: give at least 1"):
        Workload(**sizes)


def test_nothing_can_be_read_back_from_a_simulation() -> None:
    engine = Engine(CONFIGS["native"], SMALL, TraceVictims(VictimTrace()), [0])
    engine.run()

    with pytest.raises(SpecError, match="keeps no KV"):
        engine.executor.observe()
