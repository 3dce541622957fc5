"""Replays recorded KV and victims on one executor and compares what it holds with what was recorded."""

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from time import perf_counter

from vtoken.config import VTokenConfig
from vtoken.executor import Executor, KVSpec
from vtoken.plugins import first_line
from vtoken.trace import VictimTrace
from vtoken.victims import TraceVictims
from vtoken_bench.demo.drive import REQ_ID, Blocks, drive, live_at
from vtoken_bench.demo.recording import Recording
from vtoken_conformance.fingerprint import fingerprint

__all__ = ["Expectation", "Replay", "check_steps", "expected_fingerprints", "replay"]


@dataclass(frozen=True, slots=True)
class Expectation:
    """What every executor must show: blocks after each step, fingerprints (by step) where they are checked."""

    blocks: Blocks
    fingerprints: Mapping[int, str]


@dataclass(frozen=True, slots=True)
class Replay:
    """One executor's replay of one variant.

    ``difference`` is the first one found, in words, or None; ``fingerprint`` the last one checked.
    """

    num_checks: int
    fingerprint: str
    difference: str | None
    seconds: float

    @property
    def same_bytes(self) -> bool:
        """Whether every comparison held."""
        return self.difference is None


class _Difference(Exception):
    """Ends a replay; the message says what was seen and what was expected."""


def check_steps(recording: Recording, interval: int) -> list[int]:
    """Indices of the steps after which fingerprints are compared.

    Each chunk, the last step, and two in each interval: just before victims are chosen, and while they are dying.
    """
    last = len(recording.steps) - 1
    return [
        index
        for index, step in enumerate(recording.steps)
        if step.is_chunk or index == last or (step.end - recording.prompt_len) % interval in (0, interval // 4)
    ]


def expected_fingerprints(recording: Recording, trace: VictimTrace, interval: int) -> dict[int, str]:
    """Fingerprints from the recorded bytes of the live positions, by step: no executor, table or planner has a part."""
    found = {}
    for index in check_steps(recording, interval):
        positions = live_at(trace, recording.steps[index].end)
        found[index] = fingerprint({position: _token(recording, position) for position in positions})
    return found


def replay(
    recording: Recording,
    config: VTokenConfig,
    trace: VictimTrace,
    spec: KVSpec,
    executor: Executor,
    expected: Expectation,
    on_step: Callable[[], None] = lambda: None,
) -> Replay:
    """Runs the whole recording on one executor; stops at the first difference, an executor's error among them."""
    began = perf_counter()
    seen: list[str] = []
    difference = None
    try:
        executor.allocate(spec)
        for index, _ in enumerate(drive(recording, config, executor, TraceVictims(trace))):
            _compare_blocks(executor, index, expected.blocks)
            if index in expected.fingerprints:
                seen.append(executor.fingerprint(REQ_ID))
                _compare(index, "fingerprint", seen[-1], expected.fingerprints[index])
            on_step()
        _compare_bytes(recording, executor, live_at(trace, recording.num_tokens), expected.blocks.held[-1])
    except _Difference as found:
        difference = str(found)
    except Exception as error:  # an executor may raise anything: the others must still be seen
        difference = f"raised {type(error).__name__}: {first_line(error)}"
    return Replay(len(seen), seen[-1] if seen else "", difference, perf_counter() - began)


def _compare(index: int, what: str, got: object, expected: object) -> None:
    if got != expected:
        raise _Difference(f"step {index}: {what} is {got}, expected {expected}")


def _compare_blocks(executor: Executor, index: int, blocks: Blocks) -> None:
    _compare(index, "number of held blocks", len(executor.table_view(REQ_ID).block_ids), blocks.held[index])
    _compare(index, "number of live tokens", executor.table_view(REQ_ID).num_live_tokens, blocks.live[index])


def _compare_bytes(recording: Recording, executor: Executor, positions: list[int], num_held: int) -> None:
    """At the end: every live token's raw bytes, and the free list, read from the executor's own arrays."""
    index = len(recording.steps) - 1
    observation = executor.observe()
    request = observation.requests[REQ_ID]
    seen, due = Counter(request.positions), Counter(positions)
    for position in sorted((seen - due) + (due - seen)):
        _compare(index, f"number of live tokens at position {position}", seen[position], due[position])
    for position, kv in zip(request.positions, request.kv, strict=True):
        if recording.bytes_of(position, position + 1) != kv:
            raise _Difference(f"step {index}: the KV bytes of position {position} are not the recorded ones")
    _compare(index, "number of held blocks in the arrays", len(set(request.block_ids)), num_held)
    free = observation.num_blocks - 1 - num_held
    _compare(index, "number of free blocks in the arrays", len(observation.free_block_ids), free)


def _token(recording: Recording, position: int) -> bytes:
    return bytes(recording.bytes_of(position, position + 1))
