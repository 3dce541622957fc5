"""Whether a decoding engine computes what the model says, in any dtype: the check before its steps are timed.

All sides hold the same bits of the prompts' KV and take the same tokens. What each layer writes for the new tokens
depends on attention over all that came before, so it is compared, in every layer, with what transformers writes in
float32 with the same weights; and each token that an engine chooses must be the likeliest there, or nearly so. How
much may be missing is measured: twice what transformers itself is off in the engines' dtype, on average over requests
and layers, and four times in any one of them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from vtoken.executor import KVSpec
from vtoken.serving.front import Frontend
from vtoken.serving.requests import Request
from vtoken_bench.executors.comparison import GateError
from vtoken_bench.executors.prompts import HFDecoder, Prompt
from vtoken_bench.executors.sides import ReadSlots

__all__ = ["NUM_STEPS", "DecodeGate", "Track", "checked_requests"]

NUM_STEPS = 4
_MOST_REQUESTS, _MOST_TOKENS = 8, 8192
_FACTORS = {"kv_error": 2, "kv_error_worst": 4}
_FACTOR_OF_LOGITS = 8
"""Of transformers' root mean square error: twice three of them, for the chosen logit and for the likeliest."""
_LEAST_KV, _LEAST_LOGITS = 1e-3, 1e-2
"""Allowed even where transformers is not off at all, as in float32, where it is the reference."""

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def checked_requests(batch: int, live: int) -> list[int]:
    """Indices of those that are checked: at most eight, the first and the last among them."""
    count = max(1, min(batch, _MOST_REQUESTS, _MOST_TOKENS // live))
    return sorted({at * (batch - 1) // max(1, count - 1) for at in range(count)})


@dataclass(frozen=True, slots=True)
class Track:
    """What decoding some steps gave.

    Attributes:
        tokens: ``[steps, requests]``, chosen.
        kv: ``[requests, steps, planes, elements]`` float32, written.
    """

    tokens: torch.Tensor
    kv: torch.Tensor

    @classmethod
    def of_engine(cls, engine: Frontend, requests: Sequence[Request], read: ReadSlots, path: torch.Tensor) -> "Track":
        """Of some requests of an engine, which runs all it has, on a given path."""
        chosen = []
        for step in range(NUM_STEPS):
            engine.step()
            chosen.append([request.output[-1] for request in requests])
            for request, token in zip(requests, path[step].tolist(), strict=True):
                request.output[-1] = token
        return cls(torch.tensor(chosen), torch.stack([_newest(engine, request, read) for request in requests]))


@dataclass(frozen=True, slots=True)
class HFTrack(Track):
    """Of transformers; ``logits`` ``[steps, requests, vocab_size]`` float32."""

    logits: torch.Tensor

    @classmethod
    def of_hf(cls, model: Any, prompts: Sequence[Prompt], path: torch.Tensor | None = None) -> "HFTrack":
        """Of a model of transformers, on its own greedy path or on a given one."""
        decoder, found = HFDecoder(model, prompts), []
        for step in range(NUM_STEPS):
            found.append(decoder.logits().float().cpu())
            taken = found[-1].argmax(-1) if path is None else path[step]
            decoder.tokens = taken.unsqueeze(1).to(model.device)
        logits = torch.stack(found)
        return cls(logits.argmax(-1), decoder.newest_kv(NUM_STEPS), logits)


def _newest(engine: Frontend, request: Request, read: ReadSlots) -> torch.Tensor:
    """KV of the newest tokens out of the pool's arrays, ``[steps, planes, elements]``."""
    pool = engine.loop.pool
    spec: KVSpec = pool.spec
    table = pool.tables[request.req_id]
    positions = range(table.num_computed_tokens - NUM_STEPS, table.num_computed_tokens)
    slots = [table.slot_at(table.table_slot_of(position)) for position in positions]
    bits = torch.frombuffer(bytearray(read(pool.store, slots)), dtype=_DTYPES[spec.dtype])
    return bits.view(NUM_STEPS, 2 * spec.num_layers, -1).float()


class DecodeGate:
    """Judges engines by transformers in float32 on the same KV and weights.

    Args:
        reference: of transformers, float32, eager attention.
        own: the same weights in the engines' dtype; the reference itself in float32.
        prompts: of the checked requests.
    """

    def __init__(self, reference: Any, own: Any, prompts: Sequence[Prompt]) -> None:
        self._reference = HFTrack.of_hf(reference, prompts)
        self.path = self._reference.tokens
        theirs = self._reference if own is reference else HFTrack.of_hf(own, prompts, self.path)
        self.figures: dict[str, Any] = {"requests": len(prompts), "steps": NUM_STEPS}
        for key, error in self._kv_errors(theirs).items():
            self.figures[key] = {"allowed": max(_LEAST_KV, _FACTORS[key] * error), "hf": error}
        allowed = max(_LEAST_LOGITS, _FACTOR_OF_LOGITS * self._logits_error(theirs))
        self.figures["logit_regret"] = {"allowed": allowed, "hf": self._regret(theirs)}
        self.figures["equal_tokens"] = {"of": self.path.numel(), "hf": self._num_equal(theirs)}

    def check(self, name: str, track: Track) -> None:
        """Raises GateError if an engine's KV or tokens are off; else adds to ``figures``."""
        for key, error in self._kv_errors(track).items():
            allowed = self.figures[key]["allowed"]
            if not error <= allowed:
                raise GateError(
                    f"{name}: KV of {NUM_STEPS} decoded tokens is {error:.3g} off, a share of its length ({key}); "
                    f"{allowed:.3g} is allowed"
                )
            self.figures[key][name] = error
        regret, allowed = self._regret(track), self.figures["logit_regret"]["allowed"]
        if not regret <= allowed:
            raise GateError(
                f"{name}: greedy tokens {track.tokens.T.tolist()} are not transformers' {self.path.T.tolist()}: "
                f"a logit is {regret:.3g} below the highest, {allowed:.3g} is allowed"
            )
        self.figures["logit_regret"][name] = regret
        self.figures["equal_tokens"][name] = self._num_equal(track)

    def _kv_errors(self, track: Track) -> dict[str, float]:
        """Length of the difference over that of the reference, for each request and plane: mean, and worst."""
        expected = self._reference.kv
        off = (track.kv - expected).pow(2).sum((1, 3)).sqrt() / expected.pow(2).sum((1, 3)).sqrt()
        return {"kv_error": float(off.mean()), "kv_error_worst": float(off.max())}

    def _logits_error(self, theirs: HFTrack) -> float:
        """Root mean square."""
        return float((theirs.logits - self._reference.logits).pow(2).mean().sqrt())

    def _regret(self, track: Track) -> float:
        """How far a chosen token's logit lies below the highest of the reference, at most."""
        logits = self._reference.logits
        return float((logits.amax(-1) - logits.gather(-1, track.tokens.unsqueeze(-1))[..., 0]).max())

    def _num_equal(self, track: Track) -> int:
        return int((track.tokens == self.path).sum())
