"""Watches the plugin in a real engine: every death is noted, and every scheduling pass checked."""

from collections import Counter
from dataclasses import dataclass, field, replace
from typing import Any

from vllm_reference import Epoch

from vtoken.invariants import check_counts, check_unique_mapping
from vtoken.types import cdiv

BLOCK = 32


@dataclass
class Outcome:
    prompt: list[int]
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    epochs: list[Epoch] = field(default_factory=list)
    num_cached: int = 0
    aborted: bool = False
    is_greedy: bool = True


class Watch:
    """Hooks on one scheduler. Outcomes get their deaths from here, and ``counts`` what the passes met."""

    def __init__(self, scheduler: Any, outcomes: dict[int, Outcome], counts: Counter[str]) -> None:
        self.scheduler, self.outcomes, self.counts = scheduler, outcomes, counts
        self.pool: Any = scheduler.kv_cache_manager.block_pool
        self._key_of: dict[str, int] = {}
        self._rebuilt: set[int] = set()
        self._to_recycle: dict[str, dict[int, int]] = {}  # victims of the recycles that go on, by count
        self._postponed: dict[str, set[int]] = {}  # victims that waited for a free block
        self._just_started: set[str] = set()  # a prefix hit is cut to the budget after the first chunk
        self._attach()

    def _attach(self) -> None:
        side, ledger = self.scheduler.vtoken, self.scheduler.vtoken.ledger
        admit, finish, kill, preempt = ledger.admit, ledger.finish, ledger.kill, side.preempt
        recycle, end_recycling, postpone = ledger.recycle_from_here, ledger.end_recycling, side._postpone
        schedule = self.scheduler.schedule

        def watched_admit(req_id: str) -> None:
            self._key_of[req_id] = self.scheduler._submitted[req_id].trace_key
            self._outcome(req_id).epochs.append(Epoch())
            self._just_started.add(req_id)
            self._postponed[req_id] = set()
            admit(req_id)

        def note_recycled(req_id: str) -> None:
            to_recycle, count = self._to_recycle.pop(req_id, {}), ledger.count(req_id)
            self._outcome(req_id).epochs[-1].deaths += [item for item in to_recycle.items() if item[0] < count]

        def watched_end_recycling(req_id: str) -> None:
            note_recycled(req_id)
            end_recycling(req_id)

        def watched_finish(req_id: str) -> None:
            note_recycled(req_id)
            finish(req_id)

        def watched_preempt(req_id: str) -> None:
            epoch = self._outcome(req_id).epochs[-1]
            epoch.end = ledger.tables[req_id].num_computed_tokens
            self.counts["preemptions"] += 1
            self.counts["preemptions in flight"] += self.scheduler.requests[req_id].num_in_flight_tokens > 0
            self.counts["preempted plans"] += req_id in ledger._record.block_ids
            self.counts["preempted recycles"] += req_id in ledger.recycling
            note_recycled(req_id)
            preempt(req_id)

        def watched_kill(req_id: str, positions: Any) -> list[int]:
            killed = kill(req_id, positions)
            count = ledger.tables[req_id].num_computed_tokens
            self._outcome(req_id).epochs[-1].deaths += [(count, position) for position in killed]
            return killed

        def watched_postpone(req_id: str, running: Any, victims: Any) -> None:
            self._postponed[req_id].update(victims)
            postpone(req_id, running, victims)

        def watched_recycle(req_id: str, deaths: Any) -> int:
            count, listed = ledger.count(req_id), list(deaths)
            end = recycle(req_id, deaths)
            assert end > count
            assert [due for due, _ in listed[1 : end - count]] == list(range(count + 1, end))
            self._to_recycle[req_id] = {count + i: victim for i, (_, victim) in enumerate(listed[: end - count])}
            return end

        def watched_schedule(*args: Any, **kwargs: Any) -> Any:
            output = schedule(*args, **kwargs)
            self.check_pass(output)
            return output

        ledger.admit, ledger.finish, ledger.kill = watched_admit, watched_finish, watched_kill
        ledger.recycle_from_here, ledger.end_recycling = watched_recycle, watched_end_recycling
        side.preempt, side._postpone = watched_preempt, watched_postpone
        self.scheduler.schedule = watched_schedule

    def _outcome(self, req_id: str) -> Outcome:
        return self.outcomes[self._key_of[req_id]]

    def check_pass(self, output: Any) -> None:
        """INV-5, INV-7, INV-2 and the bounds, as vLLM has just scheduled."""
        side, ledger = self.scheduler.vtoken, self.scheduler.vtoken.ledger
        self.counts["peak running"] = max(self.counts["peak running"], len(output.num_scheduled_tokens))
        record = output.vtoken_record
        self.counts["moves"] += len(record.src_slots)
        recycled = ledger.recycled(output.num_scheduled_tokens)
        self.counts["recycled"] += len(recycled)
        self.counts["passed over"] += len(ledger.recycling) - len(recycled)
        assert len(set(record.dst_slots)) == len(record.dst_slots), "INV-5: a destination is named twice"
        assert not set(record.dst_slots) & set(record.src_slots), "INV-5: what a copy reads another one writes"
        for slot in (*record.dst_slots, *recycled.values()):
            block = self.pool.blocks[slot // BLOCK]
            assert block.ref_cnt == 1, f"INV-7: slot {slot} has {block.ref_cnt} holders"
            assert block.block_hash is None, f"INV-7: slot {slot} is hashed"
        if self.scheduler.vtoken_config.variant != "naive":
            check_unique_mapping(ledger.tables, _Holders(self.pool))  # type: ignore[arg-type]
        for req_id, table in ledger.tables.items():
            check_counts(table)
            self._check_bounds(req_id, table, output.num_scheduled_tokens.get(req_id, 0))
        self.counts["postponed"] = side.num_postponed
        self._just_started.clear()

    def _check_bounds(self, req_id: str, table: Any, num_scheduled: int) -> None:
        """The bounds on blocks (SPEC R-5) and on live tokens. The table holds the step's tokens already."""
        manager = self.scheduler.vtoken.ledger.manager
        blocks = manager.req_to_blocks[req_id]
        assert [block.block_id for block in blocks] == table.block_ids
        private_live = sum(
            word.bit_count() for block, word in zip(blocks, table.live_words, strict=True) if block.ref_cnt == 1
        )
        shared = sum(block.ref_cnt > 1 for block in blocks)
        side = self.scheduler.vtoken
        is_lazy = self.scheduler.vtoken_config.mode == "lazy"
        lazy = cdiv(table.cursor + self.scheduler.num_spec_tokens, BLOCK)
        held = lazy if is_lazy else shared + cdiv(private_live, BLOCK) + 1
        assert len(blocks) <= held, f"request {req_id} holds {len(blocks)} blocks"
        key = side._running[req_id].trace_key
        config = side.requests.config(key)
        is_bound = config.when == "always" and config.policy != "none" and config.variant == "vtoken"
        mass = side.requests.mass.get(key)
        is_late = mass is not None and mass.owes_choice
        if not is_bound or is_late or side.requests._replay is not None:
            return
        # Rebuilt after a preemption, a request repeats its events (SPEC K-4), whose counts its chunks may miss, and
        # its policy is asked again in the step after that.
        was_rebuilt = key in self._rebuilt
        (self._rebuilt.add if key in side.requests._sources[key]._rebuild_to else self._rebuilt.discard)(key)
        if not was_rebuilt and req_id not in self._just_started:
            num_computed = table.num_computed_tokens
            live = table.num_live_tokens - num_scheduled
            prompt_len = side._running[req_id].prompt_len
            if config.policy == "snapkv" and num_computed - num_scheduled < prompt_len:
                return  # it chooses nothing before the prompt's end
            every = self.scheduler.gate.capacity.mass_every
            unscored = every if every > 1 and mass is not None else 0  # the newest tokens
            kept = replace(config, recent=max(config.recent or 0, unscored)).kept_tokens(num_computed, prompt_len)
            if config.policy == "paged_eviction":
                kept += 3 * config.page_size  # pages with a sink, the newest, and the one being filled stay whole
            kept = max(config.budget_tokens(num_computed), kept)
            late = sum(table.is_live(position) for position in self._postponed[req_id])
            assert live <= kept + config.interval + late, f"request {req_id} keeps {live} tokens, {late} of them late"


class _Holders:
    def __init__(self, pool: Any) -> None:
        self._pool = pool

    def ref_cnt(self, block_id: int) -> int:
        return int(self._pool.blocks[block_id].ref_cnt)
