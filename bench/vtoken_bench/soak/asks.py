"""The stream of requests: random, the same for the same seed, and the same for every server."""

import random
from dataclasses import dataclass, field
from typing import Any, Literal

from vtoken_bench.tiny_model import VOCABULARY

__all__ = ["Ask", "make_asks"]

Plan = Literal["finish", "hang up", "be refused"]

_PLANS: tuple[tuple[Plan, int], ...] = (("finish", 70), ("hang up", 25), ("be refused", 5))
_MIXES: tuple[dict[str, Any], ...] = (
    {},
    {"vtoken_budget": 63},
    {"vtoken_ratio": 0.5},
    {"vtoken_policy": "random", "vtoken_seed": 3},
    {"vtoken_protect_prompt": 1},
    {"vtoken_off": 1},
)
_BAD: tuple[dict[str, Any], ...] = (
    {"vtoken_budget": 0},
    {"vtoken_policy": "no such policy"},
    {"vtoken_protect": [5]},
    {"vtoken_budged": 64},
)
_FIRST_TOKEN = 3  # behind the special ones
_PREFIXES, _PREFIX_TOKENS, _PREFIX_SHARE = 4, 80, 0.3


@dataclass(frozen=True, slots=True)
class Ask:
    """One request.

    Attributes:
        plan: what its client means to happen.
        hang_up_after: tokens of a streamed answer, or milliseconds of any other, after which a client hangs up.
        xargs: settings of vToken, which stock vLLM is not shown.
    """

    prompt: tuple[int, ...]
    max_tokens: int
    plan: Plan
    streamed: bool
    hang_up_after: int
    xargs: dict[str, Any] = field(default_factory=dict)

    def body(self, model: str, for_vtoken: bool) -> dict[str, Any]:
        """The JSON of ``/v1/completions``. A bad request to stock vLLM is bad in vLLM's own terms."""
        body: dict[str, Any] = {
            "model": model,
            "prompt": list(self.prompt),
            "max_tokens": self.max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
            "stream": self.streamed,
        }
        if for_vtoken:
            return {**body, "vllm_xargs": self.xargs}
        return {**body, "temperature": -1} if self.plan == "be refused" else body


def make_asks(count: int, seed: int) -> list[Ask]:
    """``count`` requests: prompts of 5 to 400 tokens, a third of them with a common beginning; 5 to 80 to generate."""
    draw = random.Random(seed)
    plans, weights = zip(*_PLANS, strict=True)
    prefixes = [_tokens(draw, _PREFIX_TOKENS) for _ in range(_PREFIXES)]
    asks = []
    for _ in range(count):
        plan: Plan = draw.choices(plans, weights)[0]
        prompt = _tokens(draw, draw.randint(5, 400))
        if draw.random() < _PREFIX_SHARE:
            prompt = (draw.choice(prefixes) + prompt)[:400]
        max_tokens, streamed = draw.randint(5, 80), draw.random() < 0.5
        hang_up_after = draw.randint(1, max_tokens - 1) if streamed else draw.randint(10, 500)
        xargs = draw.choice(_BAD if plan == "be refused" else _MIXES)
        asks.append(Ask(prompt, max_tokens, plan, streamed, hang_up_after, xargs))
    return asks


def _tokens(draw: random.Random, count: int) -> tuple[int, ...]:
    return tuple(draw.randrange(_FIRST_TOKEN, VOCABULARY) for _ in range(count))
