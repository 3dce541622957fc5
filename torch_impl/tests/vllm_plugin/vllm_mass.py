"""What the policies must have seen and chosen: transformers' own attention weights under the engine's deaths.

Knows of no slot, layout or snapshot: only which position was invisible from which computed count on, and of which
queries the engine's results were back.
"""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from math import nan
from typing import Any

import torch
from vllm_reference import Reference
from vllm_world import World

from vtoken.config import VTokenConfig
from vtoken.policies import RequestView
from vtoken.trace import TraceEvent
from vtoken_torch.vllm_plugin.options import usable_policy  # looked up once; get_policy takes 20 ms each time


@dataclass
class Choice:
    """One time that a policy was asked."""

    key: int
    epoch: int
    first: int  # queries whose mass may be known: [first, known)
    known: int
    num_computed: int
    prompt_len: int
    config: VTokenConfig
    positions: list[int]
    mass: list[float]
    mass_rows: list[list[float]]
    victims: list[int]
    queries: list[int]  # whose mass is known
    is_cut: bool = False  # a chunk was under way, and left out

    def __str__(self) -> str:
        return f"request {self.key}, {self.config.policy} at {self.num_computed}"


class MassWatch:
    """Notes every choice of an engine's mass policies, and checks the total of every report.

    ``every``: of the tokens that a request decodes, those at counts which it divides are scored; of chunks, all are.
    """

    def __init__(self, engine: World, every: int = 1) -> None:
        self.engine, self.every = engine, every
        self.choices: list[Choice] = []
        self.num_reports = 0
        self._asked: list[tuple[Any, Any, Any]] = []
        self._first: dict[tuple[int, int], int] = {}
        self._known: dict[tuple[int, int], int] = {}
        self._queries: defaultdict[tuple[int, int], list[int]] = defaultdict(list)
        self._passes: dict[int, dict[str, tuple[tuple[int, int], int, int]]] = {}
        self._watch()

    def _watch(self) -> None:
        scheduler = self.engine.scheduler
        victims, book = scheduler._victims, scheduler._victims.mass
        (feed,) = (part for part in scheduler.parts if type(part).__name__ == "MassFeed")
        scores, choose = book.scores, victims.choose
        pass_closed, result_came = feed.pass_closed, feed.result_came

        def watched_scores(trace_key: int, positions: Any) -> Any:
            result = scores(trace_key, positions)
            self._asked.append((list(positions), *result))
            return result

        def watched_choose(table: Any, occasion: Any) -> Any:
            self._asked.clear()
            key, config = occasion.trace_key, victims.config(occasion.trace_key)
            event = choose(table, occasion)
            for positions, mass, rows in self._asked:
                epoch = self._epoch(key)
                known = self._known.get(epoch, 0)
                chosen = [] if event is None else sorted(set(event.chosen) & set(positions))
                late = [each for counts in self._passes.values() for each in counts.values() if each[0] == epoch]
                has_chunk_under_way = any(num_new > 1 for _, _, num_new in late)
                count = known if has_chunk_under_way else table.num_computed_tokens
                assert all(position < count for position in positions)
                where = (*epoch, self._first[epoch], known, count, occasion.prompt_len)
                queries = list(self._queries[epoch])
                self.choices.append(Choice(*where, config, positions, mass, rows, chosen, queries, has_chunk_under_way))
            return event

        def watched_pass(output: Any, record: Any) -> None:
            pass_closed(output, record)
            counts = self._passes[id(output)] = {}
            for req_id, num_new in output.num_scheduled_tokens.items():
                epoch = self._epoch(scheduler._submitted[req_id].trace_key)
                count = scheduler.vtoken.ledger.tables[req_id].num_computed_tokens
                self._first.setdefault(epoch, count - num_new)
                is_prompt = count - num_new < scheduler.vtoken._running[req_id].prompt_len
                if num_new > 1 or is_prompt or count % self.every == 0:
                    counts[req_id] = epoch, count, num_new

        def watched_result(output: Any, result: Any) -> None:
            counts = self._passes.pop(id(output))
            for epoch, count, num_new in counts.values():
                self._known[epoch] = count
                self._queries[epoch] += range(count - num_new, count)
            for req_id, masses in getattr(result, "vtoken_mass", {}).items():
                assert req_id in counts, "a query too many"
                num_queries = output.num_scheduled_tokens[req_id]
                window = output.vtoken_record.mass[req_id]
                total = num_queries if not window else min(window, num_queries)
                heads = self.engine.runner.model_config.get_num_attention_heads(self.engine.runner.parallel_config)
                assert abs(masses.sum() / (total * heads) - 1) < 1e-5, "a query's mass is one for each head"
                self.num_reports += 1
            result_came(output, result)

        book.scores, victims.choose = watched_scores, watched_choose
        feed.pass_closed, feed.result_came = watched_pass, watched_result

    def _epoch(self, key: int) -> tuple[int, int]:
        return key, len(self.engine.outcomes[key].epochs) - 1

    def assert_chosen_by(self, reference: Reference) -> int:
        """Every mass and every victim is the reference's own; returns how many victims there were."""
        rows: dict[tuple[int, int], torch.Tensor] = {}
        for choice in self.choices:
            outcome, where = self.engine.outcomes[choice.key], (choice.key, choice.epoch)
            if where not in rows:
                tokens = (outcome.prompt + outcome.tokens)[: outcome.epochs[choice.epoch].end or None]
                rows[where] = mass_rows(reference, tokens, outcome.epochs[choice.epoch].deaths)
            check_choice(choice, rows[where])
        return sum(len(choice.victims) for choice in self.choices)


def assert_trace_chosen_by(
    reference: Reference, events: Iterable[TraceEvent], tokens: list[int], prompt_len: int, config: VTokenConfig
) -> None:
    """The same for a recorded trace of one request that ran alone in time: no preemption, results in step."""
    events = list(events)
    deaths = [death for event in events for death in zip(event.died, event.chosen, strict=True)]
    rows = mass_rows(reference, tokens, deaths)
    positions: set[int] = set()
    first = 0
    for event in events:
        count, victims = event.at_computed, sorted(event.chosen)
        positions.update(range(first, count))
        first = count
        where = (event.trace_key, 0, 0, count, count, prompt_len)
        choice = Choice(*where, config, sorted(positions), [], [], victims, list(range(count)))
        check_victims(choice, _seen(rows, choice))
        positions.difference_update(victims)


def check_choice(choice: Choice, rows: torch.Tensor) -> None:
    """``rows``: of ``mass_rows``."""
    mass, by_query = seen = _seen(rows, choice)
    _assert_close(choice.mass, mass, f"{choice}: mass")
    assert len(choice.mass_rows) == len(by_query), str(choice)
    for got, wanted in zip(choice.mass_rows, by_query, strict=True):
        _assert_close(got, wanted, f"{choice}: a row of the window")
    check_victims(choice, seen)


def check_victims(choice: Choice, seen: "tuple[list[float], list[list[float]]]") -> None:
    """The policy chooses the same victims by the reference's masses. ``seen``: of ``_seen``."""
    policy = usable_policy(choice.config.policy)
    mass, by_query = seen
    view = RequestView(choice.num_computed, choice.prompt_len, choice.positions, choice.config, mass, by_query)
    assert choice.victims == list(policy.select_victims(view)), f"{choice}: other victims"


@torch.inference_mode()
def mass_rows(reference: Reference, tokens: list[int], deaths: list[tuple[int, int]]) -> torch.Tensor:
    """``[query, key]``: attention weights, summed over heads, mean over layers."""
    size = len(tokens)
    visible = torch.ones(size, size, dtype=torch.bool).tril()
    for count, position in deaths:
        visible[count:, position : position + 1] = False
    mask = torch.where(visible, 0.0, torch.finfo(torch.float32).min)[None, None]
    result = reference.model(
        input_ids=torch.tensor([tokens]),
        position_ids=torch.arange(size)[None],
        attention_mask=mask,
        use_cache=False,
        output_attentions=True,
    )
    return torch.stack([weights[0].sum(0) for weights in result.attentions]).mean(0)


def _seen(rows: torch.Tensor, choice: Choice) -> tuple[list[float], list[list[float]]]:
    """``mass`` and ``mass_rows`` as the policy must have had them."""
    need = usable_policy(choice.config.policy).mass_need(choice.config)
    positions = torch.tensor(choice.positions, dtype=torch.int64)
    queries = torch.tensor(choice.queries[-need.window :], dtype=torch.int64)  # 0: all of them
    known = rows[queries[:, None], positions]
    mass = known.double().sum(0).masked_fill(positions >= choice.known, nan)
    by_query = known.masked_fill(positions > queries[:, None], nan).tolist() if need.rows else []
    return mass.tolist(), by_query


def _assert_close(got: list[float], wanted: list[float], name: str) -> None:
    a, b = torch.tensor(got, dtype=torch.float64), torch.tensor(wanted, dtype=torch.float64)
    assert torch.equal(a.isnan(), b.isnan()), f"{name}: known for other tokens"
    known = ~b.isnan()
    if not known.any():
        return  # asked before the first result was back, under pressure
    error = float((a - b)[known].abs().max() / b[known].abs().max())
    assert error < 1e-5, f"{name}: differs by {error:.1e}"
