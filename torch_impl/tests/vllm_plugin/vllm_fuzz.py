"""One random engine with random requests and aborts, drawn from a seed: every token, block and pass checked."""

import random
from collections import Counter
from collections.abc import Callable
from typing import Any

from vllm_mass import MassWatch
from vllm_reference import Reference
from vllm_world import World

POLICIES = ("random", "streaming_llm", "sliding_window", "h2o", "scissorhands", "tova", "snapkv", "paged_eviction")


def run_seed(
    world: Callable[..., World], reference: Reference, seed: int, num_requests: int = 8
) -> tuple[Counter[str], Counter[str]]:
    """Counts of what occurred, and of what the seed drew."""
    draw = random.Random(seed)
    vtoken, settings = _settings(draw)
    vtoken["signal_source"] = random.Random(f"mass {seed}").choice(["attention", "attention", "score_pass"])
    vtoken["verify"] = random.Random(f"verify {seed}").random() < 0.3
    if settings["enable_prefix_caching"] and vtoken["mode"] == "eager" and vtoken["variant"] == "vtoken":
        vtoken["keep_prompt_cache"] = random.Random(f"cache {seed}").random() < 0.3
    prompts = [[draw.randrange(3, 512) for _ in range(draw.randrange(33, 150))] for _ in range(2)]
    with world(vtoken, **settings) as engine:
        watch = MassWatch(engine, every=engine.scheduler.gate.capacity.mass_every)
        for _ in range(num_requests):
            head = draw.choice(prompts) if draw.random() < 0.6 else []
            tail = [draw.randrange(3, 512) for _ in range(draw.randrange(1, 200))]
            budget, policy = {"vtoken_budget": draw.randrange(40, 200)}, {"vtoken_policy": draw.choice(POLICIES)}
            ratio = {"vtoken_ratio": draw.uniform(0.3, 0.8)}
            own = draw.choice([{}, {}, budget, policy, ratio, {"vtoken_off": True}])
            engine.submit(head + tail, draw.randrange(20, 160), **own)
        engine.run(abort_at={draw.randrange(3, 200): key for key in draw.sample(range(num_requests), 3)})
        engine.assert_exact(reference)
        engine.assert_nothing_left()
        for part in engine.scheduler.parts:
            assert not getattr(part, "findings", None), part.findings
        side = engine.scheduler.vtoken
        met = Counter(engine.counts)
        met["victims by mass"] = watch.assert_chosen_by(reference)
        met.update(evicted=side.counters.num_evicted_tokens, unhashed=side.ledger.pool.num_unhashed)
        if settings["async_scheduling"]:
            met.update({f"{event} under async": engine.counts[event] for event in ("preemptions", "aborts")})
        return met, _composition(vtoken, settings)


def _settings(draw: random.Random) -> tuple[dict[str, Any], dict[str, Any]]:
    vtoken = {
        "policy": draw.choice(POLICIES),
        "kv_budget": draw.choice([draw.randrange(30, 120), draw.randrange(120, 260)]),
        "interval": draw.choice([1, 4, 7, 20]),
        "recent": draw.choice([None, draw.randrange(5, 25)]),
        "num_sinks": draw.randrange(6),
        "seed": draw.randrange(1000),
        "when": draw.choice(["always", "always", "pressure"]),
        "variant": draw.choice(["vtoken"] * 6 + ["naive"]),
        "recycle": draw.random() < 0.8,
        "page_size": 8,
        "mode": draw.choice(["eager", "eager", "lazy"]),
    }
    engine = {
        "num_blocks": draw.choice([17, 17, 19, 33]),
        "max_num_batched_tokens": draw.choice([16, 48, 100, 512]),
        "enable_prefix_caching": draw.random() < 0.6,
        "max_num_seqs": draw.choice([3, 8]),
        "async_scheduling": draw.random() < 0.5,
    }
    return vtoken, engine


def _composition(vtoken: dict[str, Any], settings: dict[str, Any]) -> Counter[str]:
    """What the seed drew, by name."""
    names = ("policy", "when", "variant", "mode", "interval", "signal_source", "verify", "keep_prompt_cache")
    drawn = {key: vtoken[key] for key in names if key in vtoken} | settings
    return Counter(f"{key}={value}" for key, value in drawn.items())
