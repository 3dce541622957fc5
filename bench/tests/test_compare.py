"""Small worlds whose every number was worked out by hand."""

from collections.abc import Callable

import pytest

from vtoken.config import VTokenConfig
from vtoken.reference import ReferenceExecutor
from vtoken_bench.demo.compare import Comparison, compare, num_replayed_steps
from vtoken_bench.demo.recording import Recording
from vtoken_conformance.mutants import MUTANTS


def table(comparison: Comparison) -> dict[str, tuple[int, int, int, int, int]]:
    """variant -> held at the end, peak, ideal, copied, recycled"""
    return {
        row.variant: (
            row.held_end,
            row.held_peak,
            row.ideal[-1],
            row.blocks.counters.num_moved_tokens,
            row.blocks.counters.num_recycled_tokens,
        )
        for row in comparison.rows
    }


@pytest.fixture(scope="module")
def recording(make_recording: Callable[..., Recording]) -> Recording:
    """One chunk of 16 tokens, eight decoded; even positions are looked at, odd ones hardly."""
    return make_recording(prompt=16, chunk=16, decoded=8, attention=lambda query, key: 1.0 if key % 2 else 50.0)


def test_runs_of_victims_are_counted_as_by_hand(recording: Recording) -> None:
    """Blocks of 4; sinks 0-3; after the chunk 4-11 die at once, at count 20 victims 12-15 are chosen, one a step dies.

    naive: blocks 1 and 2 are empty at once, block 3 when position 23 is written: of 6 blocks, 3 are left.
    lazy: blocks 1 and 2 leave by a plan without moves; at the end F = 4 / 16 does not exceed a quarter.
    eager: blocks 0 and 3 are full and stay where they are: no copies; 20-23 are written over 12-15.
    """
    config = VTokenConfig(policy="streaming_llm", kv_budget=8, interval=4, when="always")
    comparison = compare(recording, [config], {"reference": ReferenceExecutor()}, block_size=4)

    assert comparison.same_bytes
    assert table(comparison) == {
        "native": (6, 6, 6, 0, 0),
        "naive": (3, 4, 3, 0, 0),
        "lazy": (4, 4, 3, 0, 0),
        "eager": (3, 4, 3, 0, 4),
    }
    assert comparison.rows[1].blocks.held == (4, 3, 3, 3, 3, 4, 4, 4, 3)
    assert comparison.rows[3].blocks.held == (4, 3, 3, 3, 3, 3, 3, 3, 3)
    assert [round(row.utilization, 3) for row in comparison.rows] == [1.0, 1.0, 0.75, 1.0]


def test_scattered_victims_are_counted_as_by_hand(recording: Recording) -> None:
    """After the chunk all odd positions die at once, and nothing later (the interval is longer than the run).

    naive: every block keeps two tokens, none comes back.
    lazy: the three blocks before the tail are half live; their six tokens go into two: 4 blocks become 3.
    eager: eight live tokens fill blocks 0 and 1; the four behind (8, 10, 12, 14) are copied into their holes.
    """
    config = VTokenConfig(policy="h2o", kv_budget=8, interval=64, num_sinks=0, recent=0, when="always")
    comparison = compare(recording, [config], {"reference": ReferenceExecutor()}, block_size=4)

    assert comparison.traces["h2o"].events[0][0].chosen == tuple(range(1, 16, 2))
    assert table(comparison) == {
        "native": (6, 6, 6, 0, 0),
        "naive": (6, 6, 4, 0, 0),
        "lazy": (5, 5, 4, 6, 0),
        "eager": (4, 4, 4, 4, 0),
    }


def test_progress_is_told_of_every_step_and_of_what_it_belongs_to(recording: Recording) -> None:
    config = VTokenConfig(policy="random", kv_budget=8, interval=4, when="always")
    told: list[str] = []
    executors = {"one": ReferenceExecutor(), "two": ReferenceExecutor()}
    compare(recording, [config], executors, 4, told.append)

    assert len(told) == num_replayed_steps(recording, num_policies=1, num_executors=2) == 4 * 2 * 9
    assert told[0] == "native on one"
    assert told[-1] == "random eager on two"


def test_one_broken_executor_does_not_hide_the_good_one(recording: Recording) -> None:
    config = VTokenConfig(policy="random", kv_budget=8, interval=4, when="always")
    executors = {"good": ReferenceExecutor(), "bad": MUTANTS["FirstLayerMoved"]()}
    comparison = compare(recording, [config], executors, 4)
    eager = comparison.rows[-1]

    assert eager.replays["good"].same_bytes
    assert not eager.replays["bad"].same_bytes
    assert not comparison.same_bytes
    assert comparison.native.same_bytes  # nothing moves there
