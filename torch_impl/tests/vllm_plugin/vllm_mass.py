"""Watches what an engine's mass policies ask, see and choose, and holds it against ``vllm_mass_reference``."""

from collections import defaultdict, deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from vllm_mass_reference import Ask, Choice, check_answer, check_victims, mass_rows
from vllm_reference import Reference
from vllm_world import World

from vtoken.config import VTokenConfig
from vtoken.trace import TraceEvent
from vtoken_torch.vllm_plugin.mass.orders import Masses, Question


class MassWatch:
    """Notes every question and every choice of an engine's mass policies, and checks the total of every step's mass.

    ``every``: of the tokens that a request decodes, those at counts which it divides are scored; of chunks, all are.

    Attributes:
        num_unanswered: choices that found no answer, and were put off.
    """

    def __init__(self, engine: World, every: int = 1) -> None:
        self.engine, self.every = engine, every
        self.asks: list[Ask] = []
        self.choices: list[Choice] = []
        self.num_reports = self.num_unanswered = 0
        self._consulted = False
        self._first: dict[tuple[int, int], int] = {}
        self._known: dict[tuple[int, int], int] = {}
        self._queries: defaultdict[tuple[int, int], list[int]] = defaultdict(list)
        self._scored: dict[tuple[int, int], list[int]] = {}  # candidates of the last question with an answer
        self._passes: dict[int, dict[str, _Pass]] = {}
        self._found: defaultdict[str, deque[Masses]] = defaultdict(deque)  # of answers that are under way
        self._watch_scheduler()
        self._watch_worker()

    def _watch_scheduler(self) -> None:
        scheduler = self.engine.scheduler
        victims, book = scheduler._victims, scheduler._victims.mass
        (feed,) = (part for part in scheduler.parts if type(part).__name__ == "MassFeed")
        choose, pass_closed, result_came = victims.choose, feed.pass_closed, feed.result_came

        def consulted(method: Any) -> Any:
            def watched(*args: Any) -> Any:
                self._consulted = True
                return method(*args)

            return watched

        def watched_choose(table: Any, occasion: Any) -> Any:
            self._consulted = False
            key, config = occasion.trace_key, victims.config(occasion.trace_key)
            event = choose(table, occasion)
            mass = book.get(key)
            if mass is not None and mass.is_wanted:
                self.num_unanswered += 1
            elif self._consulted:
                self._note_choice(key, table, occasion.prompt_len, config, event)
            return event

        def watched_pass(output: Any, record: Any) -> None:
            pass_closed(output, record)
            passes = self._passes[id(output)] = {}
            for req_id, num_new in output.num_scheduled_tokens.items():
                epoch = self._epoch(scheduler._submitted[req_id].trace_key)
                table = scheduler.vtoken.ledger.tables[req_id]
                count = table.num_computed_tokens
                self._first.setdefault(epoch, count - num_new)
                is_prompt = count - num_new < scheduler.vtoken._running[req_id].prompt_len
                is_scored = num_new > 1 or is_prompt or count % self.every == 0
                order = record.mass.get(req_id)
                question, config = order and order.question, victims.config(epoch[0])
                passes[req_id] = _Pass(epoch, count, num_new, is_scored, config, question, table.candidates())

        def watched_result(output: Any, result: Any) -> None:
            answers, passes = getattr(result, "vtoken_mass", {}), self._passes.pop(id(output))
            assert answers.keys() == {req_id for req_id, each in passes.items() if each.question is not None}
            for req_id, each in passes.items():
                if each.is_scored:
                    self._known[each.epoch] = each.count
                    self._queries[each.epoch] += range(each.count - each.num_new, each.count)
                if each.question is not None:
                    self._note_ask(each, self._found[req_id].popleft(), answers[req_id])
            result_came(output, result)

        book.scores, book.lowest, victims.choose = consulted(book.scores), consulted(book.lowest), watched_choose
        feed.pass_closed, feed.result_came = watched_pass, watched_result

    def _watch_worker(self) -> None:
        (keeper,) = (part for part in self.engine.runner.vtoken.parts if type(part).__name__ == "MassKeeper")
        config = self.engine.runner
        num_heads = config.model_config.get_num_attention_heads(config.parallel_config)
        end, after_forward = keeper._collector.end, keeper.after_forward

        def watched_end() -> Any:
            masses = end()
            for req_id, each in masses.items():
                order, window = keeper_orders[req_id], keeper.kept[req_id].need.window
                total = order.num_tokens if not window else min(window, order.num_tokens)
                assert abs(each.sum() / (total * num_heads) - 1) < 1e-5, "a query's mass is one for each head"
                self.num_reports += 1
            return masses

        def watched_after_forward(req_ids: Any, result: Any) -> None:
            keeper_orders.clear()
            keeper_orders.update(keeper._orders)
            for req_id, order in keeper_orders.items():
                kept = keeper.kept[req_id]
                if order.question is not None and "answer" not in vars(kept):
                    kept.answer = self._telling(req_id, kept.answer)
            after_forward(req_ids, result)

        keeper_orders: dict[str, Any] = {}
        keeper._collector.end, keeper.after_forward = watched_end, watched_after_forward

    def _telling(self, req_id: str, answer: Any) -> Any:
        """The masses behind an answer are noted."""

        def watched(question: Question, dead: Any = None) -> Any:
            self._found[req_id].append(answer(question._replace(choice=None), dead))
            return answer(question, dead)

        return watched

    def _note_ask(self, each: "_Pass", found: Masses, answer: Any) -> None:
        epoch, known = each.epoch, self._known.get(each.epoch, 0)
        victims = None if isinstance(answer, Masses) else list(answer)
        queries = list(self._queries[epoch])
        self._scored[epoch] = each.candidates
        where = (*epoch, known, each.config, each.question, each.candidates)
        self.asks.append(Ask(*where, found, victims, queries))

    def _note_choice(self, key: int, table: Any, prompt_len: int, config: VTokenConfig, event: Any) -> None:
        epoch = self._epoch(key)
        known = self._known.get(epoch, 0)
        late = [each for passes in self._passes.values() for each in passes.values() if each.epoch == epoch]
        is_cut = any(each.num_new > 1 for each in late)
        count = known if is_cut else table.num_computed_tokens
        positions = [position for position in table.candidates() if position < count]
        chosen = [] if event is None else sorted(set(event.chosen) & set(positions))
        where = (*epoch, self._first[epoch], known, count, prompt_len)
        queries = list(self._queries[epoch])
        self.choices.append(Choice(*where, config, positions, self._scored[epoch], chosen, queries, is_cut))

    def _epoch(self, key: int) -> tuple[int, int]:
        return key, len(self.engine.outcomes[key].epochs) - 1

    def assert_chosen_by(self, reference: Reference) -> int:
        """Every mass, every answer and every victim is the reference's own; returns how many victims there were."""
        rows: dict[tuple[int, int], torch.Tensor] = {}
        for each in (*self.asks, *self.choices):
            outcome, where = self.engine.outcomes[each.key], (each.key, each.epoch)
            if where not in rows:
                tokens = (outcome.prompt + outcome.tokens)[: outcome.epochs[each.epoch].end or None]
                rows[where] = mass_rows(reference, tokens, outcome.epochs[each.epoch].deaths)
            check = check_answer if isinstance(each, Ask) else check_victims
            check(each, rows[where])
        return sum(len(choice.victims) for choice in self.choices)


@dataclass
class _Pass:
    epoch: tuple[int, int]
    count: int
    num_new: int
    is_scored: bool
    config: VTokenConfig
    question: Question | None
    candidates: list[int]


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
        candidates = sorted(positions)
        check_victims(Choice(*where, config, candidates, candidates, victims, list(range(count))), rows)
        positions.difference_update(victims)
