"""Random engines, requests and aborts; every token, block and pass checked. What occurred is counted, so that a run
in which nothing happened fails."""

import os
from collections import Counter

import pytest

BATCH = 20
MUST_OCCUR = (
    "evicted",
    "recycled",
    "moves",
    "preemptions",
    "aborts",
    "unhashed",
    "aborts in flight",
    "victims by mass",
)
RARE = ("preemptions in flight", "preemptions under async", "postponed")
"""Each batch of `make test` has them; one of the many others may not."""
NUM_SEEDS = int(os.environ.get("VTOKEN_FUZZ_SEEDS", "40"))  # more by `make fuzz`


@pytest.mark.parametrize("first", range(0, NUM_SEEDS, BATCH))
def test_no_wrong_token_no_leaked_block_no_stall(world, reference, first):
    from vllm_fuzz import run_seed

    met, drawn = Counter[str](), Counter[str]()
    for seed in range(first, first + BATCH):
        try:
            for total, count in zip((met, drawn), run_seed(world, reference, seed), strict=True):
                total.update(count)
        except Exception as error:
            error.add_note(f"seed {seed}")
            raise
    print(f"\nseeds {first} to {first + BATCH - 1}: {dict(met)}\ndrawn: {dict(sorted(drawn.items()))}")
    for event in MUST_OCCUR + (RARE if first < 2 * BATCH else ()):
        assert met[event] > 0, f"no seed met {event}"
