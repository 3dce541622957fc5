"""Decoding through an engine beside decoding through transformers' own cache, step by step in turn."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from vtoken.serving.front import Frontend
from vtoken.serving.protocol import SamplingParams
from vtoken_bench.timing import Spread, cpu_us, interleaved

__all__ = ["DecodeSpeed", "compare_decode", "decoding_engine", "decoding_hf"]

Prompts = Sequence[Sequence[int]]


@dataclass(frozen=True, slots=True)
class DecodeSpeed:
    """Processor time of one decode step, the whole batch.

    Attributes:
        ours_us, theirs_us: microseconds.
        speed_ratio: theirs / ours of each pair of steps: 1 is equal, above 1 the engine is faster.
    """

    ours_us: Spread
    theirs_us: Spread
    speed_ratio: Spread


@contextmanager
def decoding_engine(engine: Frontend, prompts: Prompts) -> Iterator[Callable[[], object]]:
    """Prefills, and yields one engine pass in which every prompt decodes a token, up to ``engine.max_model_len``."""
    sampling = SamplingParams(max_tokens=engine.max_model_len - max(map(len, prompts)))
    requests = [engine.submit(prompt, sampling) for prompt in prompts]
    while not all(request.output for request in requests):
        engine.step()
    try:
        yield engine.step
    finally:
        for request in requests:
            engine.loop.abort(request)


@contextmanager
def decoding_hf(model: Any, prompts: Prompts) -> Iterator[Callable[[], object]]:
    """The same through ``DynamicCache``, without ``generate`` and its checks. Prompts have one length: no mask."""
    import torch
    from transformers import DynamicCache

    cache, tokens = DynamicCache(config=model.config), torch.tensor(prompts, device=model.device)

    @torch.inference_mode()
    def step() -> list[list[int]]:
        nonlocal tokens
        output = model(input_ids=tokens, past_key_values=cache, use_cache=True, logits_to_keep=1)
        tokens = output.logits[:, -1].argmax(-1, keepdim=True)
        return tokens.tolist()  # type: ignore[no-any-return]

    step()
    yield step


def compare_decode(
    engine: Frontend, model: Any, prompts: Prompts, num_steps: int, on_round: Callable[[], object] = lambda: None
) -> DecodeSpeed:
    """One step of either in turn, so that both see the same machine and the same context length.

    Processor time is counted: let PyTorch use one thread.
    """
    pairs: list[tuple[float, float]] = []
    with decoding_engine(engine, prompts) as ours, decoding_hf(model, prompts) as theirs:

        def take_both() -> float:
            pairs.append((cpu_us(ours), cpu_us(theirs)))
            return pairs[-1][1] / pairs[-1][0]

        (ratio,) = interleaved([take_both], num_steps, on_round)
    ours_us, theirs_us = zip(*pairs[1:], strict=True)
    return DecodeSpeed(Spread.of(ours_us), Spread.of(theirs_us), ratio)
