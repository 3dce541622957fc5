import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from vtoken.config import VTokenConfig
from vtoken.executor import Observation
from vtoken.plugins import EXECUTORS, get_plugin
from vtoken.reference import ReferenceExecutor
from vtoken.trace import VictimTrace
from vtoken_bench.demo.compare import VARIANTS
from vtoken_bench.demo.drive import choose_victims, plan_blocks, pool_blocks
from vtoken_bench.demo.recording import Recording
from vtoken_bench.demo.replay import Expectation, Replay, check_steps, expected_fingerprints, replay
from vtoken_conformance.mutants import MUTANTS

BLOCK_SIZE = 4
INTERVAL = 8
RANDOM = VTokenConfig(policy="random", eviction_ratio=0.5, interval=INTERVAL, when="always")


@pytest.fixture(scope="module")
def recording(make_recording: Callable[..., Recording]) -> Recording:
    return make_recording(prompt=45, chunk=16, decoded=30)


@pytest.fixture(scope="module")
def trace(recording: Recording) -> VictimTrace:
    return choose_victims(recording, RANDOM, BLOCK_SIZE)


@pytest.fixture(scope="module")
def run(recording: Recording, trace: VictimTrace) -> Callable[..., Replay]:
    def run(executor: Any, variant: str = "eager", seen: VictimTrace = trace) -> Replay:
        config = RANDOM.with_changes(**VARIANTS[variant])
        fingerprints = expected_fingerprints(recording, trace, INTERVAL)
        expected = Expectation(plan_blocks(recording, config, trace, BLOCK_SIZE), fingerprints)
        spec = recording.spec(BLOCK_SIZE, pool_blocks(recording, BLOCK_SIZE))
        return replay(recording, config, seen, spec, executor, expected)

    return run


def test_checks_come_after_chunks_at_intervals_and_at_the_end(recording: Recording) -> None:
    ends = [recording.steps[index].end for index in check_steps(recording, INTERVAL)]

    assert ends == [16, 32, 45, 47, 53, 55, 61, 63, 69, 71, 75]


@pytest.mark.parametrize("executor", ["reference", "torch", "jax"])
def test_every_executor_shows_the_recorded_bytes_in_every_variant(run: Callable[..., Replay], executor: str) -> None:
    if executor != "reference":
        pytest.importorskip(executor)
    for variant in ("naive", "lazy", "eager"):
        done = run(get_plugin(EXECUTORS, executor)(), variant)

        assert (done.difference, done.num_checks) == (None, 11), variant


@pytest.mark.parametrize(
    ("mutant", "variant"),
    [
        ("WrongSlot", "native"),
        ("LostToken", "native"),
        ("StaleMask", "naive"),
        ("FirstLayerMoved", "lazy"),
        ("FirstLayerMoved", "eager"),
        ("PositionLeftBehind", "eager"),
        ("RecycleAtCursor", "eager"),
        ("DoomKills", "eager"),
    ],
)
def test_a_broken_executor_is_found_out(run: Callable[..., Replay], mutant: str, variant: str) -> None:
    done = run(MUTANTS[mutant](), variant)

    assert not done.same_bytes
    assert done.difference is not None
    assert done.difference.startswith(("step ", "raised "))


class LyingFingerprint(ReferenceExecutor):
    """Says what is expected, whatever it holds: the last token's first bit is wrong from the last step on."""

    def fingerprint(self, req_id: str) -> str:
        honest = super().fingerprint(req_id)
        table = self.tables[req_id]
        if table.num_computed_tokens == 75:
            slot = table.slot_at(table.table_slot_of(74))
            kv = self.store.kv[slot]  # type: ignore[attr-defined]
            self.store.kv[slot] = bytes([kv[0] ^ 1]) + kv[1:]  # type: ignore[attr-defined]
        return honest


def test_wrong_bytes_behind_a_right_fingerprint_are_found_out(run: Callable[..., Replay]) -> None:
    assert run(LyingFingerprint()).difference == "step 32: the KV bytes of position 74 are not the recorded ones"


class KeepsFreedBlocks(ReferenceExecutor):
    """Never flags a freed block as free in its own arrays."""

    def _mark_free(self, block_ids: Any) -> None:
        pass


def test_blocks_that_do_not_come_back_in_the_arrays_are_found_out(run: Callable[..., Replay]) -> None:
    done = run(KeepsFreedBlocks())

    assert done.difference is not None
    assert "number of free blocks in the arrays" in done.difference


def test_other_victims_than_the_expected_ones_are_found_out(run: Callable[..., Replay]) -> None:
    assert run(ReferenceExecutor(), "naive", VictimTrace()).difference == (
        "step 1: number of held blocks is 8, expected 7"
    )


class LosesOneAtTheEnd(ReferenceExecutor):
    """Reads one live token less than there are."""

    def observe(self) -> Observation:
        observation = super().observe()
        (request,) = observation.requests.values()
        short = replace(request, positions=request.positions[1:], kv=request.kv[1:])
        return replace(observation, requests={"demo": short})


def test_a_token_that_is_not_read_back_is_found_out(run: Callable[..., Replay]) -> None:
    difference = run(LosesOneAtTheEnd()).difference

    assert difference is not None
    assert re.fullmatch(r"step 32: number of live tokens at position \d+ is 0, expected 1", difference)


class OutOfMemory(ReferenceExecutor):
    def launch(self, plan: Any) -> Any:
        raise MemoryError("no 4 GiB in one piece\nand more")


def test_what_an_executor_raises_is_its_difference(run: Callable[..., Replay]) -> None:
    done = run(OutOfMemory())

    assert done.difference == "raised MemoryError: no 4 GiB in one piece"
    assert done.num_checks == 1  # the first chunk went well


def test_an_interrupt_is_not_a_difference(run: Callable[..., Replay]) -> None:
    class Interrupted(ReferenceExecutor):
        def launch(self, plan: Any) -> Any:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(Interrupted())
