"""A model of pure Python whose next token says exactly which (position, token) pairs its query saw, and an oracle.

The oracle knows prompts, sampling and the victims' deaths, and nothing else: no table, no pool, no batch.
"""

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from vtoken.config import VTokenConfig
from vtoken.executor import KVSpec
from vtoken.invariants import check_all, check_launch, check_plan, check_writes
from vtoken.policies.base import MassNeed
from vtoken.policies.mass import MassRecorder
from vtoken.reference import ListStore
from vtoken.serving.engine import ServingEngine, StepReport
from vtoken.serving.protocol import SamplingParams, StepRow
from vtoken.serving.requests import Output, Request
from vtoken.trace import TraceEvent, VictimTrace
from vtoken.types import Position, set_bits

VOCABULARY = 50
MOST_STEPS = 1500

POLICIES = (
    "streaming_llm",
    "sliding_window",
    "random",
    "h2o",
    "tova",
    "snapkv",
    "scissorhands",
    "paged_eviction",
    "none",
)
SCORE_FREE = ("streaming_llm", "sliding_window", "random")
VARIANTS: dict[str, dict[str, Any]] = {
    "eager": {},
    "eager, fill alone": {"recycle": False},
    "lazy": {"mode": "lazy", "low_watermark": 1.0, "cooldown_steps": 2},
    "naive": {"variant": "naive"},
    "native": {"variant": "native"},
}


def prompt_of(length: int, seed: int = 0) -> list[int]:
    """Tokens that differ between seeds from the first one on."""
    return [(seed * 17 + index * 7 + index * index) % VOCABULARY for index in range(length)]


def budget_of(policy: str) -> dict[str, Any]:
    return {"policy": policy, "kv_budget": None if policy == "none" else 16}


PREFIX = prompt_of(13, seed=1)
PROMPTS = [prompt_of(20), PREFIX + prompt_of(4, seed=2), PREFIX + prompt_of(9, seed=3), [1, 2, 3], prompt_of(9, seed=4)]


def next_token(visible: Iterable[tuple[int, int]], sampling: SamplingParams, draw: int) -> int:
    """A hash of what is seen, and of the request's own draw where it samples."""
    drawn = (sampling.seed, draw) if sampling.temperature else ()
    digest = hashlib.blake2b(repr((sorted(visible), drawn)).encode(), digest_size=4).digest()
    return int.from_bytes(digest, "big") % VOCABULARY


def expected_tokens(prompt: Sequence[int], sampling: SamplingParams, events: Iterable[TraceEvent]) -> tuple[int, ...]:
    """The output of a request by SPEC K-2 alone: a victim is invisible from the step that writes its death's count."""
    deaths: dict[int, int] = {}
    for event in events:
        for victim, count in zip(event.chosen, event.died, strict=True):
            deaths[victim] = min(count, deaths.get(victim, count))
    tokens = list(prompt)
    while len(tokens) - len(prompt) < sampling.max_tokens:
        end, draw = len(tokens), len(tokens) - len(prompt)
        visible = [(position, token) for position, token in enumerate(tokens) if deaths.get(position, end) >= end]
        tokens.append(next_token(visible, sampling, draw))
        if tokens[-1] in sampling.stop_token_ids:
            break
    return tuple(tokens[len(prompt) :])


def mass_of(position: int, token: int, query: int) -> float:
    """Attention of a query to a token: anything, as long as every run gives the same."""
    return (position * 37 + token * 11 + query * 5) % 101 / 101


class ToyRunner:
    """A slot holds one token as its bytes, and its position; a query reads the live slots of its row."""

    store: ListStore

    def __init__(self) -> None:
        self.need: MassNeed | None = None
        self.mass: dict[int, MassRecorder] = {}
        self.num_written = 0

    def make_store(self, spec: KVSpec) -> ListStore:
        self.store = ListStore(spec)
        return self.store

    def collect_mass(self, need: MassNeed) -> None:
        assert self.need is None
        self.need = need

    def step(self, rows: Sequence[StepRow]) -> list[int]:
        for row in rows:
            for offset, (token, slot) in enumerate(zip(row.token_ids, row.slots, strict=True)):
                self.store.kv[slot] = token.to_bytes(4, "big")
                self.store.positions[slot] = row.start + offset
                self.num_written += 1
        return [token for row in rows for token in self._attend(row)]

    def visible(self, row: int, query: Position) -> list[tuple[int, int]]:
        """(position, token) of the live slots that a query sees, as the store's own arrays have them."""
        store, size = self.store, self.store.spec.block_size
        words = zip(store.block_table[row], store.live_words[row], strict=True)
        slots = [slot for block, word in words for slot in set_bits(word, block * size)]
        seen = [(store.positions[slot], int.from_bytes(store.kv[slot], "big")) for slot in slots]
        return [(position, token) for position, token in seen if position <= query]

    def _attend(self, row: StepRow) -> list[int]:
        last = row.start + len(row.token_ids) - 1
        if self.need is not None:
            recorder = self.mass.setdefault(row.row, MassRecorder(self.need))
            for query in range(row.start, last + 1):
                seen = self.visible(row.row, query)
                recorder.observe([p for p, _ in seen], [mass_of(p, token, query) for p, token in seen])
        if row.sampling is None:
            return []
        return [next_token(self.visible(row.row, last), row.sampling, row.num_sampled)]

    def scores(self, row: int, positions: Sequence[Position]) -> tuple[list[float], list[list[float]]]:
        return self.mass[row].scores(positions)

    def forget(self, row: int) -> None:
        self.mass.pop(row, None)


@dataclass
class World:
    """An engine over a toy model, checked at every step: invariants, the store's arrays, the slots written."""

    engine: ServingEngine
    runner: Any
    trace: VictimTrace
    reports: list[StepReport] = field(default_factory=list)

    def check_step(self, report: StepReport) -> None:
        """INV-2, 6, 7, 8, and that every live token's bytes lie where the arrays say."""
        self.reports.append(report)
        assert len(self.reports) < MOST_STEPS, "nobody gets on"
        pool, tables = self.engine.pool, self.engine.pool.tables
        check_all(tables, pool.pool)
        assert self.runner.store.read_free() == set(pool.pool.free_block_ids())
        written = [slot for _, row in report.rows for slot in row.slots]
        assert len(set(written)) == len(written)
        for index, row in report.rows:
            check_writes(str(index), row.slots, pool.pool, pool.spec.block_size)
        for request in self.engine.batch.running:
            self.check_request(request)
            assert request.computed == tables[request.req_id].num_computed_tokens
        chunks = [len(row.token_ids) for _, row in report.rows if len(row.token_ids) > 1]
        assert sum(chunks) <= self.engine.batch.chunk_tokens

    def check_request(self, request: Request) -> None:
        """Its row of the store shows its live tokens, each with the bytes that were written for it."""
        table = self.engine.pool.tables[request.req_id]
        tokens = request.tokens(0, request.computed)
        expected = [(position, tokens[position]) for position in table.live_positions()]
        assert ToyRunner.visible(self.runner, self.engine.pool.row_of(request.req_id), request.computed) == expected

    def check_end(self) -> None:
        """Nothing is left behind."""
        pool = self.engine.pool
        assert self.engine.is_idle
        assert pool.pool.num_free == pool.spec.num_blocks - 1
        assert not pool.tables
        assert not self.runner.mass
        assert self.runner.store.read_free() == set(range(1, pool.spec.num_blocks))

    def check_outputs(
        self, prompts: Sequence[Sequence[int]], sampling: Sequence[SamplingParams], outputs: Sequence[Output]
    ) -> None:
        """Every output that came to its end is the oracle's."""
        for key, (prompt, params, output) in enumerate(zip(prompts, sampling, outputs, strict=True)):
            expected = expected_tokens(prompt, params, self.trace.events.get(key, []))
            assert output.token_ids == expected[: len(output.token_ids)]
            assert output.num_prompt_tokens == len(prompt)
            if output.finish_reason in ("stop", "length"):
                assert output.token_ids == expected

    def generate(self, prompts: Sequence[Sequence[int]], sampling: SamplingParams | None = None) -> list[Output]:
        """All prompts to their ends, checked against the oracle."""
        params = sampling or SamplingParams(max_tokens=24)
        outputs = self.engine.generate(prompts, params)
        self.check_end()
        self.check_outputs(prompts, [params] * len(prompts), outputs)
        return outputs


def make_config(**options: Any) -> VTokenConfig:
    defaults = {"policy": "streaming_llm", "kv_budget": 16, "interval": 4, "num_sinks": 2, "when": "always"}
    return VTokenConfig(**{**defaults, "page_size": 4, "history": 4, **options})


def make_world(
    *,
    num_blocks: int = 33,
    max_num_reqs: int = 4,
    runner: ToyRunner | None = None,
    replay: VictimTrace | None = None,
    policy_object: Any = None,
    chunk_tokens: int = 8,
    max_num_seqs: int | None = None,
    share_prefixes: bool = True,
    **options: Any,
) -> World:
    """Block size 4; a pool of ``num_blocks``; further keywords go to the config."""
    shape: dict[str, Any] = {"num_layers": 1, "num_kv_heads": 1, "num_query_heads": 1, "head_size": 1}
    spec = KVSpec(**shape, dtype="float32", block_size=4, num_blocks=num_blocks, max_num_reqs=max_num_reqs)
    runner, trace = runner or ToyRunner(), replay or VictimTrace()
    made = ServingEngine(
        runner,
        spec,
        make_config(**options),
        policy=policy_object,
        chunk_tokens=chunk_tokens,
        max_num_seqs=max_num_seqs,
        share_prefixes=share_prefixes,
        replay=replay,
        on_event=None if replay else trace.add,
    )
    world = World(made, runner, trace)
    made.on_step = world.check_step
    launch = made.pool.launch

    def checked_launch(plan: Any) -> Any:
        check_plan(plan, made.pool.tables[plan.req_id])
        check_launch([plan], made.pool.tables)
        return launch(plan)

    made.pool.launch = checked_launch  # type: ignore[method-assign]
    return world
