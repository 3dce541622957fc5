from collections import Counter

import torch
from hf_world import World, prompt

from vtoken.serving.protocol import SamplingParams
from vtoken_torch.hf.sampling import sample

PARAMS = SamplingParams(temperature=0.8, top_k=20, seed=7, max_tokens=8)


def test_greedy_takes_the_largest_logit() -> None:
    logits = torch.randn(3, 50, generator=torch.Generator().manual_seed(0))
    assert sample(logits, [(SamplingParams(), 0)] * 3) == logits.argmax(-1).tolist()


def test_a_draw_depends_on_seed_and_index_alone() -> None:
    logits = torch.randn(4, 200, generator=torch.Generator().manual_seed(1))
    alone = sample(logits[2:3], [(PARAMS, 5)])
    others = [(SamplingParams(temperature=2.0, seed=row), row) for row in range(4)]
    beside = sample(logits, [*others[:2], (PARAMS, 5), others[3]])
    assert beside[2] == alone[0]
    draws = {sample(logits[2:3], [(PARAMS, index)])[0] for index in range(40)}
    assert len(draws) > 5


def test_draws_follow_the_distribution() -> None:
    logits = torch.tensor([[0.0, 1.0, 2.0, -torch.inf]])
    params = SamplingParams(temperature=1.0, seed=3)
    counts = Counter(sample(logits, [(params, index)])[0] for index in range(3000))
    for token, share in enumerate(logits[0].softmax(-1).tolist()):
        assert abs(counts[token] / 3000 - share) < 0.03


def test_top_k_leaves_the_likeliest() -> None:
    logits = torch.randn(1, 100, generator=torch.Generator().manual_seed(2))
    best = set(logits[0].topk(3).indices.tolist())
    params = SamplingParams(temperature=5.0, top_k=3, seed=1)
    assert {sample(logits, [(params, index)])[0] for index in range(60)} == best


def test_sampled_outputs_do_not_depend_on_the_batch() -> None:
    mine = prompt(12)
    (alone,) = World().engine.generate([mine], PARAMS, progress=False)
    others = [SamplingParams(temperature=1.0, seed=seed, max_tokens=5) for seed in range(3)]
    prompts = [prompt(7, 5), mine, prompt(30, 6), prompt(3, 7)]
    beside = World().engine.generate(prompts, [others[0], PARAMS, *others[1:]], progress=False)
    assert beside[1].token_ids == alone.token_ids
