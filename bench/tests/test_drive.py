from collections.abc import Callable
from pathlib import Path

import pytest

from vtoken.config import VTokenConfig
from vtoken.trace import TraceEvent, VictimTrace
from vtoken_bench.demo.drive import choose_victims, live_at, plan_blocks, pool_blocks
from vtoken_bench.demo.recording import Recording

POLICIES = ["h2o", "streaming_llm", "random", "scissorhands", "tova", "snapkv", "sliding_window", "paged_eviction"]


@pytest.fixture(scope="module")
def recording(make_recording: Callable[..., Recording]) -> Recording:
    return make_recording(prompt=70, chunk=32, decoded=40, attention=lambda query, key: 1.0 + (key * 13 + query) % 7)


def config(policy: str) -> VTokenConfig:
    return VTokenConfig(policy=policy, eviction_ratio=0.5, interval=8, when="always")


def test_a_victim_is_live_until_the_position_of_its_death_is_written() -> None:
    trace = VictimTrace()
    trace.add(TraceEvent(0, 4, (1, 2), (4, 5)))

    assert live_at(trace, 4) == [0, 1, 2, 3]
    assert live_at(trace, 5) == [0, 2, 3, 4]
    assert live_at(trace, 6) == [0, 3, 4, 5]


@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_keeps_its_budget_and_the_table_agrees_with_the_death_counts(
    recording: Recording, policy: str
) -> None:
    trace = choose_victims(recording, config(policy), block_size=4)
    blocks = plan_blocks(recording, config(policy), trace, block_size=4)

    assert blocks.live == tuple(len(live_at(trace, step.end)) for step in recording.steps)
    page = 16 if policy == "paged_eviction" else 1  # whole pages: up to one page less is evicted
    assert blocks.live[-1] <= config(policy).budget_tokens(recording.num_tokens) + 8 + page - 1


@pytest.mark.parametrize("policy", ["h2o", "scissorhands", "random"])
def test_choosing_twice_gives_the_same_victims_and_so_does_the_file(
    recording: Recording, policy: str, tmp_path: Path
) -> None:
    first, second = (choose_victims(recording, config(policy), block_size) for block_size in (4, 16))
    first.save(tmp_path / "victims.jsonl")
    loaded = VictimTrace.load(tmp_path / "victims.jsonl")

    assert first.events == second.events == loaded.events
    assert loaded.meta["policy"] == policy
    assert first.events[0]


def test_the_pool_just_holds_the_native_run(recording: Recording) -> None:
    native = VTokenConfig(policy="none", variant="native")

    assert pool_blocks(recording, 4) == 28
    assert plan_blocks(recording, native, VictimTrace(), 4).held[-1] == 28
