"""One real engine on a tiny random Llama, watched: every death and every scheduling pass is noted and checked."""

import os
from collections import Counter
from collections.abc import Collection, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any
from unittest.mock import patch

from torch.compiler import set_stance
from vllm_reference import Epoch, Reference

from vtoken.invariants import check_counts, check_unique_mapping
from vtoken.types import cdiv

for _key, _value in {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "CRITICAL",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # binding would tie the other tests of this process to one core too
}.items():
    os.environ.setdefault(_key, _value)

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


def assert_outcome(reference: Reference, outcome: Outcome, name: str) -> None:
    """Every generated token is the reference's greedy choice (unless drawn), its logprob within 1e-4."""
    expected = reference.expected(outcome.prompt + outcome.tokens, len(outcome.prompt), outcome.epochs)
    assert len(expected) == len(outcome.tokens)
    if outcome.is_greedy:
        assert [token for token, _ in expected] == outcome.tokens, f"{name}: other tokens"
    difference = max((abs(a - b) for (_, a), b in zip(expected, outcome.logprobs, strict=True)), default=0.0)
    assert difference < 1e-4, f"{name}: logprobs differ by {difference}"


def engine_settings(vtoken: dict[str, Any] | None, num_blocks: int = 65, **settings: Any) -> dict[str, Any]:
    """Arguments of ``LLM`` for a small engine. ``vtoken``: the plugin's settings; None is plain vLLM."""
    if vtoken is not None:
        from vtoken_torch.vllm_plugin.compat import SCHEDULER, WORKER

        settings |= {"scheduler_cls": SCHEDULER, "worker_cls": WORKER, "additional_config": {"vtoken": vtoken}}
    base = {
        "max_model_len": 512,
        "enforce_eager": True,
        "max_num_seqs": 8,
        "dtype": "float32",
        "skip_tokenizer_init": True,
        "block_size": BLOCK,
        "kv_cache_memory_bytes": 1 << 22,
        "num_gpu_blocks_override": num_blocks,
        "max_num_batched_tokens": 512,
        "enable_prefix_caching": False,
    }
    return {**base, **settings}


@contextmanager
def asynchronous_on_the_cpu() -> Iterator[None]:
    """vLLM's CPU platform has the last word on asynchronous scheduling, and turns it off. Here it stays on."""
    from vllm.platforms import current_platform

    platform = type(current_platform)
    check = platform.check_and_update_config

    def check_and_keep(vllm_config: Any) -> None:
        check(vllm_config)
        vllm_config.scheduler_config.async_scheduling = True

    with patch.object(platform, "check_and_update_config", staticmethod(check_and_keep)):
        yield


class World:
    """``vtoken``: the plugin's settings; None builds plain vLLM. ``async_scheduling=True`` holds on the CPU too."""

    def __init__(self, model_dir: str, vtoken: dict[str, Any] | None, **settings: Any) -> None:
        from vllm import LLM

        # vLLM compiles its count of logprob ranks whatever enforce_eager says: ten seconds in each process.
        self._stance = "force_eager" if settings.get("enforce_eager", True) else "default"
        is_async = settings.get("async_scheduling", False)
        with (
            patch("gc.collect"),  # vLLM collects nine times for each engine: most of the time of a test
            asynchronous_on_the_cpu() if is_async else nullcontext(),
        ):
            self.engine: Any = LLM(model_dir, **engine_settings(vtoken, **settings)).llm_engine
        core = self.engine.engine_core.engine_core
        assert core.batch_queue_size == (2 if is_async else 1)
        self.core = core
        self.scheduler: Any = core.scheduler
        self.runner: Any = core.model_executor.driver_worker.worker.model_runner
        self.pool: Any = self.scheduler.kv_cache_manager.block_pool
        self.num_free_at_start = self.pool.get_num_free_blocks()
        self.outcomes: dict[int, Outcome] = {}
        self.counts: Counter[str] = Counter()
        self._key_of: dict[str, int] = {}
        self._rebuilt: set[int] = set()
        self._to_recycle: dict[str, dict[int, int]] = {}  # victims of the recycles that go on, by count
        self._postponed: dict[str, set[int]] = {}  # victims that waited for a free block
        self._just_started: set[str] = set()  # a prefix hit is cut to the budget after the first chunk
        if vtoken is not None:
            self._watch()

    def __enter__(self) -> "World":
        return self

    def __exit__(self, *_: object) -> None:
        self.scheduler.__dict__.pop("schedule", None)
        with patch("gc.collect"):
            self.engine.engine_core.shutdown()
            del self.engine, self.scheduler, self.runner, self.pool, self.core

    # -- driving -----------------------------------------------------------------------------------------------------

    def submit(
        self,
        prompt: list[int],
        max_tokens: int,
        sampling: dict[str, Any] | None = None,
        lora: Any = None,
        **extra_args: Any,
    ) -> int:
        """``sampling``: changes to the ``SamplingParams``; n outputs are n outcomes. Returns the first one's key."""
        from vllm import SamplingParams
        from vllm.inputs import TokensPrompt

        key = len(self.outcomes)
        settings = {"temperature": 0, "max_tokens": max_tokens, "ignore_eos": True, "logprobs": 0, **(sampling or {})}
        params = SamplingParams(**settings, extra_args=extra_args or None)
        self.engine.add_request(str(key), TokensPrompt(prompt_token_ids=prompt), params, lora_request=lora)
        for number in range(params.n):
            self.outcomes[key + number] = Outcome(list(prompt), is_greedy=params.temperature == 0)
        return key

    def run(self, abort_at: dict[int, int] | None = None, max_quiet_steps: int = 150) -> None:
        """Steps until all requests have ended. ``abort_at``: step -> key. No token in many steps is a deadlock."""
        step = num_quiet = 0
        while self.engine.has_unfinished_requests():
            num_quiet = 0 if self.step() else num_quiet + 1
            assert num_quiet < max_quiet_steps, f"no token in {num_quiet} steps: the engine makes no progress"
            step += 1
            key = (abort_at or {}).get(step)
            if key is not None and self._is_unfinished(key):
                self.counts["aborts"] += 1
                self.counts["aborts in flight"] += bool(self.core.batch_queue)
                self.engine.abort_request([str(key)])
                self.outcomes[key].aborted = True
        self.counts["steps"] += step

    def step(self) -> list[Any]:
        """One step of the engine; outcomes are brought up to date. Returns its outputs."""
        with set_stance(self._stance):
            outputs: list[Any] = self.engine.step()
        for output in outputs:
            for completion in output.outputs:
                outcome = self.outcomes[int(output.request_id) + completion.index]
                outcome.tokens = list(completion.token_ids)
                chosen = zip(outcome.tokens, completion.logprobs or (), strict=True)
                outcome.logprobs = [ranks[token].logprob for token, ranks in chosen]
                outcome.num_cached = output.num_cached_tokens or 0
        return outputs

    def generate(self, prompts: list[list[int]], max_tokens: int, **extra_args: Any) -> list[list[int]]:
        keys = [self.submit(prompt, max_tokens, **extra_args) for prompt in prompts]
        self.run()
        return [self.outcomes[key].tokens for key in keys]

    def _is_unfinished(self, key: int) -> bool:
        return any(str(key) == req_id.split("-")[0] for req_id in self.scheduler.requests)

    # -- verdicts ----------------------------------------------------------------------------------------------------

    def assert_exact(self, reference: Reference, keys: Collection[int] | None = None) -> None:
        """Every request (``keys``: these alone) said what the reference says."""
        for key, outcome in self.outcomes.items():
            if keys is not None and key not in keys:
                continue
            if outcome.epochs:
                assert_outcome(reference, outcome, f"request {key}")
            else:
                assert outcome.aborted, f"request {key} never ran"

    def assert_nothing_left(self) -> None:
        """All blocks are back, and no book keeps a line."""
        side = self.scheduler.vtoken
        manager = side.ledger.manager
        assert self.pool.get_num_free_blocks() == self.num_free_at_start
        assert all(block.ref_cnt == 0 for block in self.pool.blocks if not block.is_null)
        leftovers = (side.ledger.tables, side._running, side.ledger.recycling, side._wrote, self.scheduler._submitted)
        leftovers += (manager.num_evicted, manager.parked, manager.req_to_blocks, side.requests._sources)
        leftovers += (side.requests._configs, side.ledger.sharing.reserved, side.ledger._moved)
        leftovers += (side._alarm_of, side._mortal, side._unpacked)
        assert not any(leftovers), leftovers

    # -- watching ----------------------------------------------------------------------------------------------------

    def _watch(self) -> None:
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
            self._check_pass(output)
            return output

        ledger.admit, ledger.finish, ledger.kill = watched_admit, watched_finish, watched_kill
        ledger.recycle_from_here, ledger.end_recycling = watched_recycle, watched_end_recycling
        side.preempt, side._postpone = watched_preempt, watched_postpone
        self.scheduler.schedule = watched_schedule

    def _outcome(self, req_id: str) -> Outcome:
        return self.outcomes[self._key_of[req_id]]

    def _check_pass(self, output: Any) -> None:
        side, ledger = self.scheduler.vtoken, self.scheduler.vtoken.ledger
        self.counts["peak running"] = max(self.counts["peak running"], len(output.num_scheduled_tokens))
        record = output.vtoken_record
        self.counts["moves"] += len(record.src_slots)
        recycled = ledger.recycled(output.num_scheduled_tokens)
        self.counts["recycled"] += len(recycled)
        self.counts["passed over"] += len(ledger.recycling) - len(recycled)
        assert len(set(record.dst_slots)) == len(record.dst_slots), "INV-5: a destination is named twice"
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
