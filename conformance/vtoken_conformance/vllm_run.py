"""One run of vLLM: what it is asked for, the tokens that each step wrote, and what the cache retained after it."""

from dataclasses import dataclass

from vtoken.executor import DType, KVSpec
from vtoken.trace import VictimTrace
from vtoken.types import Position, ReqId

__all__ = ["Pass", "Seen", "Setting", "VllmRun"]


@dataclass(frozen=True, slots=True)
class Setting:
    """What one run differs in.

    Attributes:
        head_size: elements of one head.
        is_shared: prefix caching is on, and the requests begin alike, so that they hold blocks together.
        runner: vLLM's model runner, 1 or 2; on the CPU, 2 needs Triton's interpreter.
        is_lazy: deaths only mark, and blocks come back by evacuation; else the layout is always packed.
    """

    dtype: DType
    head_size: int = 32
    is_shared: bool = False
    runner: int = 1
    is_lazy: bool = False


@dataclass(frozen=True, slots=True)
class Seen:
    """One request's retained KV after a step, read from vLLM's cache through the worker's own block table.

    ``positions`` stand in physical order.
    """

    positions: tuple[Position, ...]
    num_blocks: int
    fingerprint: str


@dataclass(frozen=True, slots=True)
class Pass:
    """One step of the engine.

    Attributes:
        finished: requests that ended before it.
        started: requests that began with it: trace key and prompt length.
        kv: bytes of the tokens that each request wrote, canonical order, read back after the step.
        seen: what the requests of this step retain after it.
    """

    finished: tuple[ReqId, ...]
    started: dict[ReqId, tuple[int, int]]
    kv: dict[ReqId, bytes]
    seen: dict[ReqId, Seen]


@dataclass(frozen=True, slots=True)
class VllmRun:
    """A whole run of ``setting``, and the victims of its policies.

    ``num_shared``: blocks with more than one holder, summed over the steps.
    """

    setting: Setting
    spec: KVSpec
    passes: tuple[Pass, ...]
    trace: VictimTrace
    num_moves: int
    num_recycles: int
    num_shared: int
