"""Decoding through an engine beside decoding through transformers' own cache, step by step in turn.

``python -m vtoken_bench.engine_speed`` compares the PyTorch engine on the CPU, by processor time of one thread.
"""

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vtoken.serving.front import Frontend
from vtoken.serving.protocol import SamplingParams
from vtoken.types import cdiv
from vtoken_bench.arguments import positive
from vtoken_bench.timing import Spread, cpu_us, interleaved

__all__ = ["DecodeSpeed", "compare_decode", "decoding_engine", "decoding_hf", "main"]

_CHUNK_TOKENS = 512

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


def main(arguments: Sequence[str] | None = None) -> int:
    """A line for each context length."""
    import torch

    from vtoken_bench.models import load_model
    from vtoken_torch.engine import TorchEngine

    parser = argparse.ArgumentParser(prog="python -m vtoken_bench.engine_speed", description=__doc__)
    parser.add_argument("--model", type=Path, metavar="FOLDER", help="a transformers model; SmolLM2-135M")
    parser.add_argument("--batch", type=positive, default=4, help="prompts at once (%(default)s)")
    parser.add_argument("--live", type=positive, nargs="+", default=[128, 512], help="tokens of a prompt (128 512)")
    parser.add_argument("--steps", type=positive, default=60, help="pairs of steps (%(default)s)")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    ours, theirs = (load_model(options.model).model for _ in range(2))
    vocabulary = ours.get_input_embeddings().num_embeddings
    for live in options.live:
        draw = torch.Generator().manual_seed(live)
        prompts = torch.randint(3, vocabulary, (options.batch, live), generator=draw).tolist()
        early = cdiv(options.batch * live, _CHUNK_TOKENS)  # tokens of the first prompt before the last one's first
        room = live + early + options.steps + 4
        engine = TorchEngine(ours, max_num_seqs=options.batch, max_model_len=room, chunk_tokens=_CHUNK_TOKENS)
        speed = compare_decode(engine, theirs, prompts, options.steps)
        engine.release()
        lines = (
            ("vToken, us", speed.ours_us, 0),
            ("transformers, us", speed.theirs_us, 0),
            ("speed ratio", speed.speed_ratio, 3),
        )
        for what, spread, digits in lines:
            ends = f"[{spread.low:.{digits}f}, {spread.high:.{digits}f}]"
            print(f"{live:6} live  {what:18} {spread.median:10.{digits}f}  {ends}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
