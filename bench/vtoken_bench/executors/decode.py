"""Greedy decoding of one model through both engines, and through transformers' own cache beside them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from time import perf_counter
from typing import Any

from vtoken.errors import InvariantError
from vtoken.serving.front import Frontend
from vtoken.serving.requests import Request
from vtoken_bench.executors.comparison import Clock, Comparison, Elapsed, Samples, Shares, bytes_row
from vtoken_bench.executors.gate import NUM_STEPS, DecodeGate, Track, checked_requests
from vtoken_bench.executors.memory import growth, peak_rise, resident_bytes
from vtoken_bench.executors.models import EngineSide, Models
from vtoken_bench.executors.prompts import HFDecoder, Prompt, Prompts, place_in_pool
from vtoken_bench.executors.sides import memcpy
from vtoken_bench.timing import interleaved

__all__ = ["DecodeShape", "compare_decoding"]

_LEAST_ROUNDS, _MOST_SECONDS = 3, 60.0
_ROUNDS_OF_HALF = 3
_WARM_STEPS = 1


@dataclass(frozen=True, slots=True)
class DecodeShape:
    """``batch`` requests that decode after prompts of ``live`` tokens; ``with_hf``: beside transformers."""

    batch: int
    live: int
    with_hf: bool = True


@dataclass(slots=True)
class _Decoding:
    """One side under way: its engine, its requests, and what it takes."""

    side: EngineSide
    engine: Frontend
    requests: list[Request]
    step_seconds: float = 0.0
    memory: int | None = None

    @classmethod
    def begin(cls, side: EngineSide, prompts: Sequence[Prompt], num_steps: int) -> "_Decoding":
        length = len(prompts[0].token_ids)
        engine = side.make(max_num_seqs=len(prompts), max_model_len=length + num_steps + 2)
        return cls(side, engine, place_in_pool(engine, prompts))

    @property
    def pool_bytes(self) -> int:
        return self.side.pool_bytes(self.engine.loop.pool.store)

    def end(self) -> None:
        if any(request.finish_reason for request in self.requests):
            raise InvariantError("a request ended before the last timed step")
        release = getattr(self.engine, "release", None)  # PyTorch's model gets its attention back
        if release is not None:
            release()


def compare_decoding(
    models: Models, prompts: Prompts, shape: DecodeShape, clock: Clock, repeats: int, params: dict[str, Any],
    on_round: Callable[[], object] = lambda: None,
) -> list[Comparison]:  # fmt: skip
    """Checks both engines, then times steps, one of each in turn; half the context apart, for attention's share.

    Raises:
        GateError: an engine computes something else; nothing was timed.
    """
    dtype = next(models.own.parameters()).dtype
    taken = prompts.take(models.reference, shape.batch, dtype)
    checked = checked_requests(shape.batch, shape.live)
    gate = DecodeGate(models.reference, models.own, [taken[at] for at in checked])
    samples, memory = _whole_context(models, taken, checked, gate, shape.with_hf, clock, repeats, params, on_round)
    half = _half_context(models, [prompt.shortened(max(2, shape.live // 2)) for prompt in taken], clock)
    attention = Shares(*map(_saved_twice, (samples.jax, samples.torch), half))
    about = {"gate": gate.figures, "notes": _notes(prompts, shape)}
    step = samples.row("decode_step_us", params, {"attention": attention}, **about)
    return [step, samples.rates("decode_tokens_per_s", shape.batch, params), *memory]


def _saved_twice(whole: Sequence[Elapsed], half_us: float) -> float:
    """Attention's share of a step, if it costs as much for each token: twice what half the tokens save."""
    return min(1.0, max(0.0, 2 * (1 - half_us / median(each.us for each in whole))))


def _whole_context(
    models: Models, prompts: Sequence[Prompt], checked: Sequence[int], gate: DecodeGate, with_hf: bool, clock: Clock,
    repeats: int, params: dict[str, Any], on_round: Callable[[], object],
) -> tuple[Samples, list[Comparison]]:  # fmt: skip
    num_steps = NUM_STEPS + _WARM_STEPS + repeats + 1
    works = [_checked(models, side, prompts, checked, gate, num_steps) for side in models.sides]
    theirs = _beside(models, prompts) if with_hf else None
    seconds = sum(each.step_seconds for each in works) + (theirs.step_seconds if theirs else 0)
    rounds = min(repeats, max(_LEAST_ROUNDS, int(_MOST_SECONDS / seconds)))
    copy = memcpy(models.device, len(prompts) * len(prompts[0].token_ids) * models.token_bytes)
    samples = _timed(works, theirs, copy, clock, rounds, on_round)
    memory = _memory_rows(works, theirs, models.weights_bytes, params)
    for each in works[::-1]:
        each.end()
    return samples, memory


def _checked(
    models: Models,
    side: EngineSide,
    prompts: Sequence[Prompt],
    checked: Sequence[int],
    gate: DecodeGate,
    num_steps: int,
) -> _Decoding:
    """An engine that has passed the gate, and what it takes."""
    before = resident_bytes() if models.device == "cpu" else None
    work = _Decoding.begin(side, prompts, num_steps)
    track = Track.of_engine(work.engine, [work.requests[at] for at in checked], side.read, gate.path)
    gate.check(side.name, track)
    work.memory, work.step_seconds = _taken(before, work.engine.step)
    return work


@dataclass(slots=True)
class _Beside:
    """transformers under way."""

    decoder: HFDecoder
    step_seconds: float = 0.0
    memory: int | None = None


def _beside(models: Models, prompts: Sequence[Prompt]) -> _Beside:
    before = resident_bytes() if models.device == "cpu" else None
    work = _Beside(HFDecoder(models.own, prompts))
    work.decoder.step()
    work.memory, work.step_seconds = _taken(before, work.decoder.step)
    return work


def _taken(before: int | None, step: Callable[[], object]) -> tuple[int | None, float]:
    """Memory since ``before``, with what one step takes on top of it at its peak; and the seconds of that step."""
    grown = growth(before)
    start = perf_counter()
    rise = peak_rise(step)
    return (None if grown is None or rise is None else grown + rise), perf_counter() - start


def _timed(
    works: Sequence[_Decoding], theirs: _Beside | None, copy: Callable[[], object], clock: Clock, rounds: int,
    on_round: Callable[[], object],
) -> Samples:  # fmt: skip
    samples = Samples(parts={"matmul": ([], [])}, floors={"memcpy": []}, others={"hf": []} if theirs else {})
    products = [work.side.products(len(work.requests)) for work in works]

    def take_all() -> float:
        for work, times in zip(works, (samples.jax, samples.torch), strict=True):
            times.append(clock(work.engine.step))
        if theirs is not None:
            samples.others["hf"].append(clock(theirs.decoder.step))
        for multiply, part in zip(products, samples.parts["matmul"], strict=True):
            part.append(clock(multiply))
        samples.floors["memcpy"].append(clock(copy))
        return 0.0

    interleaved([take_all], rounds, on_round)
    samples.drop_first()
    return samples


def _half_context(models: Models, prompts: Sequence[Prompt], clock: Clock) -> list[float]:
    """Microseconds of a step of each side after prompts of half the length."""
    works = [_Decoding.begin(side, prompts, _ROUNDS_OF_HALF + 1) for side in models.sides]
    spreads = interleaved([partial(_us, clock, work.engine.step) for work in works], _ROUNDS_OF_HALF)
    for work in works[::-1]:
        work.end()
    return [spread.median for spread in spreads]


def _us(clock: Clock, work: Callable[[], object]) -> float:
    return clock(work).us


def _memory_rows(
    works: Sequence[_Decoding], theirs: _Beside | None, weights: dict[str, int], params: dict[str, Any]
) -> list[Comparison]:
    jax, torch = works
    pools = bytes_row(
        "decode_kv_bytes", params, jax.pool_bytes, torch.pool_bytes, {"hf": theirs.decoder.kv_bytes} if theirs else {}
    )
    taken = {"jax": jax.memory, "torch": torch.memory} | ({"hf": theirs.memory} if theirs else {})
    whole = {key: weights[key] + more for key, more in taken.items() if more is not None and key in weights}
    if len(whole) < len(taken):
        return [pools]
    return [pools, bytes_row("decode_memory_bytes", params, whole.pop("jax"), whole.pop("torch"), whole)]


def _notes(prompts: Prompts, shape: DecodeShape) -> list[str]:
    different = prompts.num_different(shape.batch)
    prompt = "1 prompt" if different == 1 else f"{different} different prompts"
    notes = [f"KV of {prompt}, computed by transformers in float32, the same bits for all"]
    return notes if shape.with_hf else [*notes, "without transformers: no memory for its cache beside both pools"]
