"""The executor protocol: what runs a program of KV operations and shows its own arrays.

Executors execute; they do not plan. A driver (conformance, bench, an engine's scheduler) reads ``table_view`` and
``pool_view``, lets a planner make a plan from them, and hands it to ``launch``.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal, Protocol, TypeAlias

from vtoken.config import Regime
from vtoken.errors import SpecError
from vtoken.reclamation.plan import PoolView, ReclamationPlan, TableView
from vtoken.types import BlockId, Position, ReqId

__all__ = ["Attention", "Buffer", "DType", "Executor", "KVSpec", "Observation", "RequestObservation", "Ticket"]

DType = Literal["float32", "bfloat16", "float16"]
Buffer: TypeAlias = bytes | bytearray | memoryview
"""Raw bytes in canonical order."""

_ITEM_BYTES: dict[str, int] = {"float32": 4, "bfloat16": 2, "float16": 2}
MAX_BLOCK_SIZE = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class KVSpec:
    """Shape of a KV pool. ``num_blocks`` includes the null block; the tail of a pool row is never a request's."""

    num_layers: int
    num_kv_heads: int
    num_query_heads: int
    head_size: int
    dtype: DType
    block_size: int
    num_blocks: int
    max_num_reqs: int = 16
    regime: Regime = "ordered"

    def __post_init__(self) -> None:
        for key in ("num_layers", "num_kv_heads", "num_query_heads", "head_size", "max_num_reqs"):
            if getattr(self, key) < 1:
                raise SpecError(f"{key}={getattr(self, key)}: give at least 1")
        if self.dtype not in _ITEM_BYTES:
            raise SpecError(f"dtype={self.dtype!r}: choose one of {', '.join(_ITEM_BYTES)}")
        if not 1 <= self.block_size <= MAX_BLOCK_SIZE:
            raise SpecError(f"block_size={self.block_size}: give 1 to {MAX_BLOCK_SIZE}")
        if self.num_blocks < 2:
            raise SpecError(f"num_blocks={self.num_blocks}: give at least 2, since block 0 is the null block")
        if self.num_query_heads % self.num_kv_heads:
            raise SpecError(
                f"num_query_heads={self.num_query_heads} is no multiple of num_kv_heads={self.num_kv_heads}: "
                "every KV head serves the same number of query heads (GQA)"
            )

    @property
    def item_bytes(self) -> int:
        """Bytes of one element."""
        return _ITEM_BYTES[self.dtype]

    @property
    def token_elements(self) -> int:
        """Elements of one token's KV in all layers: ``num_layers * 2 * num_kv_heads * head_size``."""
        return self.num_layers * 2 * self.num_kv_heads * self.head_size

    @property
    def token_bytes(self) -> int:
        """Bytes of one token's KV in all layers. KV bytes count KV heads, not query heads."""
        return self.token_elements * self.item_bytes

    @property
    def num_slots(self) -> int:
        """Slots of the pool, those of the null block included."""
        return self.num_blocks * self.block_size

    @property
    def query_elements(self) -> int:
        """Elements of one token's query in all layers: ``num_layers * num_query_heads * head_size``."""
        return self.num_layers * self.num_query_heads * self.head_size


@dataclass(frozen=True, slots=True)
class Ticket:
    """Receipt of one launched plan. ``fenced_block_ids``, without a holder now, come back through ``reap``."""

    req_id: ReqId
    num_moves: int
    fenced_block_ids: tuple[BlockId, ...]


@dataclass(frozen=True, slots=True)
class Attention:
    """Attention of a request's newest tokens over its live tokens.

    Attributes:
        out: float32 ``[num_queries, num_layers, num_query_heads, head_size]``, flat.
        positions: the live tokens in the executor's physical order.
        mass: float32, aligned with ``positions``: attention paid to each token, summed over queries and query heads,
            mean over layers. Its total is ``num_queries * num_query_heads``.
    """

    out: array[float]
    positions: tuple[Position, ...]
    mass: array[float]


@dataclass(frozen=True, slots=True)
class RequestObservation:
    """One request read back from the executor's own arrays.

    Attributes:
        block_ids: block table row, in order, without padding.
        live_words: one word for each block; bit o says that slot o is live.
        positions: positions of the live slots in physical order (block by block, low offset first).
        kv: raw bytes of each live slot, aligned with ``positions``, canonical order (layer, K then V, head, dim).
        fingerprint: 16 hex digits over the live tokens, computed on the executor's device.
    """

    block_ids: tuple[BlockId, ...]
    live_words: tuple[int, ...]
    positions: tuple[Position, ...]
    kv: tuple[bytes, ...]
    fingerprint: str


@dataclass(frozen=True, slots=True)
class Observation:
    """The whole executor read back: requests and the free list (block ids, without the null block)."""

    requests: Mapping[ReqId, RequestObservation]
    free_block_ids: frozenset[BlockId]
    num_blocks: int

    @property
    def held_block_ids(self) -> frozenset[BlockId]:
        """Distinct non-null blocks in any request's table."""
        return frozenset(block for request in self.requests.values() for block in request.block_ids)


class Executor(Protocol):
    """Runs KV operations. Every call is atomic: it happens whole, or raises and changes nothing.

    ``kv`` arguments hold ``num_tokens * spec.token_bytes`` raw bytes, canonical order
    (token, layer, K then V, head, dim). ``q`` holds float32 ``[num_queries, num_layers, num_query_heads, head_size]``.
    """

    @property
    def name(self) -> str:
        """The executor's name in the entry-point group ``vtoken.executors``."""
        ...

    spec: KVSpec

    def allocate(self, spec: KVSpec) -> None:
        """Makes the pool and all arrays; everything from before is gone."""
        ...

    def admit(self, req_id: ReqId) -> None:
        """Registers an empty request."""
        ...

    def append(self, req_id: ReqId, num_tokens: int, kv: Buffer) -> None:
        """Writes the next positions at the cursor, taking blocks as needed. Raises PoolExhausted."""
        ...

    def doom(self, req_id: ReqId, positions: Iterable[Position]) -> None:
        """Queues victims; they stay live until killed or recycled."""
        ...

    def kill(self, req_id: ReqId, positions: Iterable[Position]) -> list[Position]:
        """Kills at once; idempotent; returns the positions that changed. Frees nothing."""
        ...

    def recycle(self, req_id: ReqId, kv: Buffer) -> None:
        """Writes the next position over the next doomed token (SPEC C-1): no copy, no growth."""
        ...

    def launch(self, plan: ReclamationPlan) -> Ticket:
        """Enqueues a plan's copies and commits it to table and pool."""
        ...

    def advance(self) -> None:
        """One engine step has ended: its forward and its copies are done."""
        ...

    def reap(self) -> list[BlockId]:
        """Gives blocks whose fences have passed to the pool; returns them."""
        ...

    def attend(self, req_id: ReqId, q: Buffer, num_queries: int = 1) -> Attention:
        """Attention of the newest ``num_queries`` positions; a token is visible to queries at or after its position."""
        ...

    def fork_prefix(self, parent_id: ReqId, child_id: ReqId, num_tokens: int) -> None:
        """Admits a child that shares the parent's leading blocks (a whole number of them)."""
        ...

    def preempt(self, req_id: ReqId) -> None:
        """Drops a request's KV and its tables; it must be admitted and rebuilt from scratch."""
        ...

    def finish(self, req_id: ReqId) -> None:
        """Ends a request; its blocks go back (through their fence, where a plan is in flight)."""
        ...

    def observe(self) -> Observation:
        """Reads everything back from the executor's own arrays."""
        ...

    def fingerprint(self, req_id: ReqId) -> str:
        """A request's fingerprint alone, computed where the KV lives; equal to the one that ``observe`` reports."""
        ...

    def table_view(self, req_id: ReqId) -> TableView:
        """What planners and policies may read of a request."""
        ...

    def pool_view(self) -> PoolView:
        """What planners may read of the pool."""
        ...
