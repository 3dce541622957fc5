"""n-gram drafts on one engine, as a program of its own: numba, which they import, spoils the process's next engine.

Prints what occurred as JSON; a wrong token or a leak ends it with a traceback.
"""

import json
import random
import sys
from collections import Counter
from typing import Any

from vllm_reference import Reference
from vllm_world import World

SETTINGS = {"policy": "streaming_llm", "kv_budget": 63, "interval": 8, "when": "always"}
DRAFTS = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 2, "prompt_lookup_max": 4}
POLICIES = (
    {"vtoken_policy": "random", "vtoken_budget": 50},
    {"vtoken_budget": 64},
    {"vtoken_policy": "sliding_window", "vtoken_budget": 120},
    {"vtoken_off": 1},
)


def main(model_dir: str) -> None:
    draw = random.Random(5)
    with World(
        model_dir,
        SETTINGS,
        num_blocks=17,
        max_num_batched_tokens=100,
        enable_prefix_caching=True,
        speculative_config=DRAFTS,
    ) as engine:
        counts: Counter[str] = Counter()
        _count_drafts(engine.scheduler, counts)
        for number in range(10):
            phrase = [draw.randrange(3, 512) for _ in range(draw.randrange(5, 12))]
            prompt = (phrase * 40)[: draw.randrange(40, 220)]
            engine.submit(prompt, 100, **POLICIES[number % len(POLICIES)])
        refused = ""
        try:
            engine.submit([1, 2, 3], 5, vtoken_policy="h2o")
        except ValueError as error:
            refused = str(error)
        engine.run(abort_at={40: 3})
        engine.assert_exact(Reference(model_dir))
        engine.assert_nothing_left()
        counts["evicted"] = engine.scheduler.vtoken.counters.num_evicted_tokens
        print(json.dumps({**counts, **engine.counts, "refused request": refused}))


def _count_drafts(scheduler: Any, counts: Counter[str]) -> None:
    update = scheduler.update_from_output

    def counted(output: Any, result: Any) -> Any:
        for req_id, drafts in output.scheduled_spec_decode_tokens.items():
            accepted = len(result.sampled_token_ids[result.req_id_to_index[req_id]]) - 1
            counts["accepted drafts"] += accepted
            counts["rejected drafts"] += len(drafts) - accepted
        return update(output, result)

    scheduler.update_from_output = counted


if __name__ == "__main__":
    main(sys.argv[1])
