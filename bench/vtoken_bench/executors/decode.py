"""Greedy decoding of one model through both engines, and through transformers' own cache beside them."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

from vtoken.errors import InvariantError
from vtoken.serving.front import Frontend
from vtoken.types import cdiv
from vtoken_bench.engine_speed import decoding_engine, decoding_hf
from vtoken_bench.executors.comparison import Clock, Comparison, GateError, Samples
from vtoken_bench.timing import interleaved

__all__ = ["compare_engines", "matrix_products", "room_to_decode"]

_CHECKED_STEPS = 4
_CHUNK_TOKENS = 512  # an engine's default


def room_to_decode(num_prompts: int, length: int, repeats: int) -> int:
    """Tokens that the first prompt gets to, which decodes while the others' chunks are computed; a few to spare."""
    return length + cdiv(num_prompts * length, _CHUNK_TOKENS) + _CHECKED_STEPS + repeats + 4


def compare_engines(
    jax: Frontend, torch: Frontend, model: Any, prompts: Sequence[Sequence[int]], clock: Clock, repeats: int,
    params: dict[str, Any], on_round: Callable[[], object] = lambda: None,
) -> Comparison:  # fmt: skip
    """Checks that both engines give transformers' tokens, then times steps, one of each in turn.

    Args:
        model: of transformers, with attention of its own: not the PyTorch engine's.
        prompts: of one length.

    Raises:
        GateError: tokens differ; nothing was timed.
    """
    samples = Samples(others={"hf": []}, bounds={"matmul": []})
    with ExitStack() as stack:
        ours = [stack.enter_context(decoding_engine(engine, prompts)) for engine in (jax, torch)]
        requests = [engine.loop.requests for engine in (jax, torch)]
        theirs = stack.enter_context(decoding_hf(model, prompts))
        expected: list[list[int]] = []  # by step: the prompts' second tokens and those after them
        for _ in range(_CHECKED_STEPS):
            expected.append([token for (token,) in theirs()])  # type: ignore[attr-defined]
            for step in ours:
                step()
        for name, each in zip(("jax", "torch"), requests, strict=True):
            for at, tokens in enumerate(zip(*expected, strict=True)):  # prompts of early chunks are a few tokens ahead
                got = tuple(each[at].output[1 : 1 + _CHECKED_STEPS])
                if got != tokens:
                    raise GateError(f"{name}: greedy tokens {got} of prompt {at} are not transformers' {tokens}")
        products = matrix_products(model, len(prompts))

        def take_all() -> float:
            samples.jax.append(clock(ours[0]))
            samples.torch.append(clock(ours[1]))
            samples.others["hf"].append(clock(theirs))
            samples.bounds["matmul"].append(clock(products))
            return 0.0

        interleaved([take_all], repeats, on_round)
        if any(request.finish_reason for each in requests for request in each):
            raise InvariantError("a request ended before the last timed step")
    samples.drop_first()
    return samples.row("decode_step_us", params)


def matrix_products(model: Any, batch: int) -> Callable[[], object]:
    """All linear layers of a model on ``batch`` tokens, one after the other, and nothing else of it."""
    import torch

    weights = [each.weight for each in model.modules() if isinstance(each, torch.nn.Linear)]
    inputs = {
        weight.shape[1]: torch.ones(batch, weight.shape[1], dtype=weight.dtype, device=weight.device)
        for weight in weights
    }

    @torch.inference_mode()
    def run() -> float:
        total = [torch.nn.functional.linear(inputs[weight.shape[1]], weight) for weight in weights]
        return float(total[-1][0, 0])  # waits for the device

    return run
