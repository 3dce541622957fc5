"""One real engine on a tiny random Llama, watched (``vllm_watch``), and its verdicts."""

import os
from collections import Counter
from collections.abc import Collection, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

from torch.compiler import set_stance
from vllm_reference import Reference
from vllm_watch import BLOCK, Outcome, Watch

for _key, _value in {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "CRITICAL",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # binding would tie the other tests of this process to one core too
}.items():
    os.environ.setdefault(_key, _value)


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
        self.watch = Watch(self.scheduler, self.outcomes, self.counts) if vtoken is not None else None

    def __enter__(self) -> "World":
        return self

    def __exit__(self, *_: object) -> None:
        self.scheduler.__dict__.pop("schedule", None)
        with patch("gc.collect"):
            self.engine.engine_core.shutdown()
            del self.engine, self.scheduler, self.runner, self.pool, self.core, self.watch

    # -- driving -----------------------------------------------------------------------------------------------------

    def submit(
        self,
        prompt: list[int],
        max_tokens: int,
        sampling: dict[str, Any] | None = None,
        lora: Any = None,
        priority: int = 0,
        **extra_args: Any,
    ) -> int:
        """``sampling``: changes to the ``SamplingParams``; n outputs are n outcomes. Returns the first one's key."""
        from vllm import SamplingParams
        from vllm.inputs import TokensPrompt

        key = len(self.outcomes)
        settings = {"temperature": 0, "max_tokens": max_tokens, "ignore_eos": True, "logprobs": 0, **(sampling or {})}
        params = SamplingParams(**settings, extra_args=extra_args or None)
        inputs = TokensPrompt(prompt_token_ids=prompt)
        self.engine.add_request(str(key), inputs, params, lora_request=lora, priority=priority)
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
