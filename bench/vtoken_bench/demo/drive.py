"""One pass of a recording through the scheduler's side: the loop that choosing, planning and replaying share."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from vtoken.config import VTokenConfig
from vtoken.executor import Executor
from vtoken.policies import Signal, get_policy
from vtoken.scheduler import Counters, KVScheduler
from vtoken.trace import VictimTrace
from vtoken.types import Position, cdiv
from vtoken.victims import PolicyVictims, TraceVictims, VictimSource
from vtoken_bench.demo.recording import RecordedMass, Recording, Step
from vtoken_bench.simulation.no_store import CapacityExecutor

__all__ = ["REQ_ID", "TRACE_KEY", "Blocks", "choose_victims", "drive", "live_at", "plan_blocks", "pool_blocks"]

REQ_ID = "demo"
TRACE_KEY = 0


def pool_blocks(recording: Recording, block_size: int) -> int:
    """Blocks of every replay's pool: what the whole run needs if nothing is evicted."""
    return cdiv(recording.num_tokens, block_size)


def drive(
    recording: Recording,
    config: VTokenConfig,
    executor: Executor,
    victims: VictimSource,
) -> Iterator[tuple[Step, Counters]]:
    """Runs the recorded steps on an executor whose pool is allocated.

    Yields each step between its write and the choice of the next victims: there a position is dead exactly if its
    death count lies below the computed count (SPEC K-2).
    """
    scheduler = KVScheduler(config, executor, victims)
    scheduler.admit(REQ_ID, TRACE_KEY, recording.prompt_len)
    for step in recording.steps:
        scheduler.begin_pass({REQ_ID: step.num_tokens})
        scheduler.write(REQ_ID, step.num_tokens, recording.bytes_of(step.start, step.end))
        yield step, scheduler.counters
        scheduler.end_step(REQ_ID, after_chunk=step.is_chunk)
        scheduler.end_pass()


def choose_victims(recording: Recording, config: VTokenConfig, block_size: int) -> VictimTrace:
    """Lets the configured policy choose from the recorded scores, once for all replays."""
    policy = get_policy(config.policy)
    mass = RecordedMass(policy.mass_need(config)) if Signal.ATTENTION_MASS in policy.signals else None
    budget = {"kv_budget": config.kv_budget, "eviction_ratio": config.eviction_ratio, "interval": config.interval}
    trace = VictimTrace({"policy": config.policy, **budget, "prompt_len": recording.prompt_len})
    victims = PolicyVictims(config, policy, mass, trace.add)
    for step, _ in drive(recording, config, _capacity(recording, block_size), victims):
        if mass:
            mass.feed(step)
    return trace


def live_at(trace: VictimTrace, num_computed: int) -> list[Position]:
    """Live positions once ``num_computed`` tokens are written, from the trace's death counts alone."""
    dead = {
        victim
        for event in trace.events.get(TRACE_KEY, ())
        for victim, count in zip(event.chosen, event.died, strict=True)
        if count < num_computed
    }
    return [position for position in range(num_computed) if position not in dead]


@dataclass(frozen=True, slots=True)
class Blocks:
    """What one variant holds: blocks and live tokens after each step's write, and what had happened by the end."""

    held: tuple[int, ...]
    live: tuple[int, ...]
    counters: Counters


def plan_blocks(recording: Recording, config: VTokenConfig, trace: VictimTrace, block_size: int) -> Blocks:
    """A replay without KV: the spec's own table and pool. Every executor must hold the same."""
    executor = _capacity(recording, block_size)
    held, live = [], []
    counters = Counters()
    for _, so_far in drive(recording, config, executor, TraceVictims(trace)):
        held.append(executor.pool_view().num_held)
        live.append(executor.table_view(REQ_ID).num_live_tokens)
        counters = replace(so_far)
    return Blocks(tuple(held), tuple(live), counters)


def _capacity(recording: Recording, block_size: int) -> CapacityExecutor:
    executor = CapacityExecutor()
    executor.allocate(recording.spec(block_size, pool_blocks(recording, block_size)))
    return executor
