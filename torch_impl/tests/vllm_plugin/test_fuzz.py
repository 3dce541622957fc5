"""Random engines, requests and aborts; every token, block and pass checked. What occurred is counted, so that a run
in which nothing happened fails."""

import os
import random
from collections import Counter

import pytest

BATCH = 10
NUM_SEEDS = int(os.environ.get("VTOKEN_FUZZ_SEEDS", "30"))  # more at night


def _settings(draw: random.Random) -> tuple[dict, dict]:
    vtoken = {
        "policy": draw.choice(["random", "streaming_llm", "sliding_window"]),
        "kv_budget": draw.choice([draw.randrange(30, 120), draw.randrange(120, 260)]),
        "interval": draw.choice([1, 4, 7, 20]),
        "recent": draw.choice([None, draw.randrange(5, 25)]),
        "num_sinks": draw.randrange(6),
        "seed": draw.randrange(1000),
        "when": draw.choice(["always", "always", "pressure"]),
        "variant": draw.choice(["vtoken"] * 6 + ["naive"]),
        "recycle": draw.random() < 0.8,
    }
    engine = {
        "num_blocks": draw.choice([17, 17, 19, 33]),
        "max_num_batched_tokens": draw.choice([16, 48, 100, 512]),
        "enable_prefix_caching": draw.random() < 0.6,
        "max_num_seqs": draw.choice([3, 8]),
    }
    return vtoken, engine


def _run(world, reference, seed: int) -> Counter[str]:
    draw = random.Random(seed)
    vtoken, settings = _settings(draw)
    prompts = [[draw.randrange(3, 512) for _ in range(draw.randrange(33, 150))] for _ in range(2)]
    with world(vtoken, **settings) as engine:
        for _ in range(8):
            head = draw.choice(prompts) if draw.random() < 0.6 else []
            tail = [draw.randrange(3, 512) for _ in range(draw.randrange(1, 200))]
            own = draw.choice([{}, {}, {}, {"vtoken_budget": draw.randrange(40, 200)}, {"vtoken_off": True}])
            engine.submit(head + tail, draw.randrange(20, 160), **own)
        engine.run(abort_at={draw.randrange(3, 200): key for key in draw.sample(range(8), 3)})
        engine.assert_exact(reference)
        engine.assert_nothing_left()
        side = engine.scheduler.vtoken
        return engine.counts + Counter(evicted=side.counters.num_evicted_tokens, unhashed=side.ledger.pool.num_unhashed)


@pytest.mark.parametrize("first", range(0, NUM_SEEDS, BATCH))
def test_no_wrong_token_no_leaked_block_no_stall(world, reference, first):
    met: Counter[str] = Counter()
    for seed in range(first, first + BATCH):
        try:
            met += _run(world, reference, seed)
        except Exception as error:
            error.add_note(f"seed {seed}")
            raise
    print(f"seeds {first} to {first + BATCH - 1}: {dict(met)}")
    for event in ("evicted", "recycled", "moves", "preemptions", "aborts", "unhashed"):
        assert met[event] > 0, f"no seed met {event}"
