"""The same victims in five variants: one request alone, then as many as the pool takes."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TypeAlias

from vtoken.config import VTokenConfig
from vtoken.errors import InvariantError, SpecError
from vtoken.policies import Signal, get_policy
from vtoken.reclamation.admission import Answer
from vtoken.trace import VictimTrace
from vtoken.types import cdiv
from vtoken.victims import PolicyVictims, TraceVictims
from vtoken_bench.simulation.engine import Engine, Run, Workload
from vtoken_bench.simulation.synthetic import SyntheticScores

__all__ = ["VARIANTS", "Outcome", "Study", "variant_configs"]

VARIANTS = ("native", "naive", "lazy", "fill", "vtoken")
"""Nothing evicted; dead blocks freed; lazy evacuation; packed by ``fill`` alone; eager mode (fill and recycle)."""

_MAX_REQUESTS, _MAX_TOKENS = 1_000, 1_000_000
"""Of one run. All runs of a study together take some 0.3 ms for each such token: minutes at the limit."""

OnProgress: TypeAlias = Callable[[str, float], None]
"""(what runs, share of it that is done)."""


def variant_configs(config: VTokenConfig) -> dict[str, VTokenConfig]:
    """One configuration for each variant, with everything that concerns victims the same."""
    return {
        "native": config.with_changes(variant="native"),
        "naive": config.with_changes(variant="naive"),
        "lazy": config.with_changes(variant="vtoken", mode="lazy"),
        "fill": config.with_changes(variant="vtoken", mode="eager", recycle=False),
        "vtoken": config.with_changes(variant="vtoken", mode="eager", recycle=True),
    }


@dataclass(frozen=True, slots=True)
class Outcome:
    """One variant: a request alone, and the run with the most requests that fit (None if not one does)."""

    alone: Run
    max_requests: int
    frontier: Run | None
    refusal: str
    """Why one request more does not fit."""


class Study:
    """Records victims once for each request, and replays them in every variant.

    Victims depend on the configuration's policy, budget, interval and seed, on the request's number, and on the
    workload's prompt, output and chunk; never on the pool, the block size or the variant.
    """

    def __init__(self, config: VTokenConfig, workload: Workload, on_progress: OnProgress | None = None) -> None:
        self.workload = workload
        self.configs = variant_configs(config)
        self._on_progress = on_progress or (lambda _, __: None)
        self._trace = VictimTrace()
        self._recorded: set[int] = set()
        policy = get_policy(config.policy)
        self._policy = policy
        self._refuse_vast_pool()
        self._refuse_small_pool()
        self._scores = (
            SyntheticScores(policy.mass_need(config), workload.total, config.seed)
            if Signal.ATTENTION_MASS in policy.signals
            else None
        )

    def _refuse_vast_pool(self) -> None:
        """Refuses what would take hours, or more memory than there is, before anything is sized by it."""
        workload = self.workload
        kept = max(1, self.configs["vtoken"].budget_tokens(workload.total))
        num_requests = workload.pool_blocks // cdiv(kept, workload.block_size)
        limit = min(_MAX_REQUESTS, _MAX_TOKENS // workload.total)
        if num_requests > limit:
            raise SpecError(
                f"pool_blocks={workload.pool_blocks}: some {num_requests:,} requests of {workload.total:,} tokens "
                f"would fit, and this simulation goes to {_MAX_REQUESTS:,} requests and {_MAX_TOKENS:,} tokens in all: "
                f"give fewer blocks, or scale requests and pool down alike"
            )

    def _refuse_small_pool(self) -> None:
        engine = Engine(self.configs["vtoken"], self.workload, TraceVictims(self._trace), [0])
        admission = engine.admission()
        if admission.answer is Answer.NEVER_FITS:
            raise SpecError(admission.reason)

    def outcomes(self) -> Iterator[tuple[str, Outcome]]:
        """Each variant's outcome, as soon as it is known."""
        survivors = None
        for name in VARIANTS:
            alone = self.alone(name)
            if name != "native":
                survivors = survivors or alone.survivors
                if alone.survivors != survivors:
                    raise InvariantError(f"K-4: {name} evicted other tokens than naive from the same trace")
            yield name, self._searched(name, alone)

    def alone(self, name: str) -> Run:
        """One request in a pool that never runs out; lazy mode is told that free blocks are always scarce."""
        config = self.configs[name].with_changes(low_watermark=1.0)
        run = self._run(name, config, self._ample_pool(), num_requests=1)
        if not run.fits:
            raise InvariantError(f"one request alone does not fit its ample pool: {run.refusal}")
        return run

    def together(self, name: str, num_requests: int) -> Run:
        """So many requests side by side in the workload's pool."""
        return self._run(name, self.configs[name], self.workload, num_requests)

    def _searched(self, name: str, alone: Run) -> Outcome:
        """Starts from what the lone request's peak promises, strides up or down from there, and halves what is left."""
        best, best_run, refusal = 0, None, ""
        refused: int | None = None
        num_requests, stride = max(1, self.workload.pool_blocks // alone.peak_blocks), 1
        while refused is None or refused > best + 1:
            run = self.together(name, num_requests)
            if run.fits:
                best, best_run = num_requests, run
            else:
                refused, refusal = num_requests, run.refusal
            if refused is None:
                num_requests = best + stride
            elif best_run is None:
                num_requests = max(1, refused - stride)
            else:
                num_requests = (best + refused) // 2
            stride *= 2
        return Outcome(alone, best, best_run, refusal)

    def _run(self, name: str, config: VTokenConfig, workload: Workload, num_requests: int) -> Run:
        if config.variant != "native":
            for key in range(num_requests):
                self._record(key)
        label = f"{name}: {num_requests} request{'s' * (num_requests > 1)}"
        engine = Engine(config, workload, TraceVictims(self._trace), range(num_requests))
        return engine.run(lambda done: self._on_progress(label, done))

    def _record(self, key: int) -> None:
        if key in self._recorded:
            return
        config = self.configs["vtoken"]
        # Policies that draw see the seed alone, so that each request needs its own.
        seeded = config.with_changes(seed=config.seed << 16 | key)
        victims = PolicyVictims(seeded, self._policy, self._scores, self._trace.add)
        label = f"victims of request {key + 1}"
        run = Engine(config, self._ample_pool(), victims, [key]).run(lambda done: self._on_progress(label, done))
        if not run.fits:
            raise InvariantError(f"one request alone does not fit its ample pool: {run.refusal}")
        self._recorded.add(key)

    def _ample_pool(self) -> Workload:
        """Room for one request that evicts nothing, twice: lazy mode needs headroom and targets."""
        whole = cdiv(self.workload.total + min(self.workload.chunk, self.workload.prompt), self.workload.block_size)
        return replace(self.workload, pool_blocks=2 * whole + 1)
