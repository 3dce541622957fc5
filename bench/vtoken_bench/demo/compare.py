"""All replays of one recording: policies x variants x executors."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from vtoken.config import VTokenConfig
from vtoken.executor import Executor
from vtoken.trace import VictimTrace
from vtoken.types import cdiv
from vtoken_bench.demo.drive import Blocks, choose_victims, plan_blocks, pool_blocks
from vtoken_bench.demo.recording import Recording
from vtoken_bench.demo.replay import Expectation, Replay, expected_fingerprints, replay

__all__ = ["NATIVE", "VARIANTS", "Comparison", "Progress", "Row", "compare", "num_replayed_steps"]

VARIANTS: Mapping[str, Mapping[str, Any]] = {
    "native": {"variant": "native"},
    "naive": {"variant": "naive"},
    # The pool just holds the native run, so that it never runs short here: at any number of free blocks lazy mode may
    # begin, and its fragmentation trigger alone decides.
    "lazy": {"variant": "vtoken", "mode": "lazy", "low_watermark": 1.0},
    "eager": {"variant": "vtoken", "mode": "eager"},
}
NATIVE = "native"

Progress = Callable[[str], None]
"""Told what a step belongs to, for each step of each replay."""


@dataclass(frozen=True, slots=True)
class Row:
    """One variant under one policy. ``policy`` is empty for native, where none has a say."""

    policy: str
    variant: str
    blocks: Blocks
    block_size: int
    replays: Mapping[str, Replay]

    @property
    def held_end(self) -> int:
        """Blocks held when the last token is written."""
        return self.blocks.held[-1]

    @property
    def held_peak(self) -> int:
        """Most blocks held after a step's write, prefill included."""
        return max(self.blocks.held)

    @property
    def ideal(self) -> tuple[int, ...]:
        """Blocks that the live tokens would fill without a hole, after each step."""
        return tuple(cdiv(live, self.block_size) for live in self.blocks.live)

    @property
    def utilization(self) -> float:
        """Share of the held slots that are live, at the end."""
        return self.blocks.live[-1] / (self.held_end * self.block_size)

    @property
    def same_bytes(self) -> bool:
        """Whether every executor that replayed it showed the recorded bytes."""
        return all(done.same_bytes for done in self.replays.values())


@dataclass(frozen=True, slots=True)
class Comparison:
    """The table, with the victim traces behind it (by policy)."""

    rows: tuple[Row, ...]
    traces: Mapping[str, VictimTrace]

    @property
    def same_bytes(self) -> bool:
        """Whether no comparison failed anywhere."""
        return all(row.same_bytes for row in self.rows)

    @property
    def native(self) -> Row:
        """The run in which nothing is evicted."""
        return next(row for row in self.rows if row.variant == NATIVE)


def num_replayed_steps(recording: Recording, num_policies: int, num_executors: int) -> int:
    """Steps of all replays together, for a progress bar."""
    return (1 + num_policies * (len(VARIANTS) - 1)) * num_executors * len(recording.steps)


def compare(
    recording: Recording,
    configs: Sequence[VTokenConfig],
    executors: Mapping[str, Executor],
    block_size: int,
    progress: Progress = lambda _: None,
) -> Comparison:
    """Replays everything. Native runs once; each config's policy chooses once, and its variants replay its trace."""
    matrix = _Matrix(recording, executors, block_size, progress)
    nothing = VictimTrace()
    rows = [*matrix.rows("", VTokenConfig(policy="none", interval=configs[0].interval), nothing, [NATIVE])]
    traces = {}
    for config in configs:
        trace = traces[config.policy] = choose_victims(recording, config, block_size)
        rows += matrix.rows(config.policy, config, trace, [name for name in VARIANTS if name != NATIVE])
    return Comparison(tuple(rows), traces)


@dataclass(frozen=True, slots=True)
class _Matrix:
    recording: Recording
    executors: Mapping[str, Executor]
    block_size: int
    progress: Progress

    def rows(self, policy: str, config: VTokenConfig, trace: VictimTrace, variants: Sequence[str]) -> Iterator[Row]:
        fingerprints = expected_fingerprints(self.recording, trace, config.interval)
        spec = self.recording.spec(self.block_size, pool_blocks(self.recording, self.block_size))
        for variant in variants:
            changed = config.with_changes(**VARIANTS[variant])
            blocks = plan_blocks(self.recording, changed, trace, self.block_size)
            expected = Expectation(blocks, fingerprints)
            replays = {}
            for name, executor in self.executors.items():
                on_step = partial(self.progress, " ".join(filter(None, (policy, variant, "on", name))))
                replays[name] = replay(self.recording, changed, trace, spec, executor, expected, on_step)
            yield Row(policy, variant, blocks, self.block_size, replays)
