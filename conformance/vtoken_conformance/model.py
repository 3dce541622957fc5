"""The brute-force model: what SPEC.md says of every request, by the dumbest means there are.

A block is an object known by identity, a request a list of blocks with one row of positions each, KV a dictionary from
position to bytes. No token table, planner or pool of the spec is imported, so that agreement is not true by
construction. Each call checks first and then changes; what the spec forbids raises ``Refusal``, with nothing changed.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain

from vtoken.errors import PoolExhausted
from vtoken.executor import KVSpec
from vtoken.types import BlockId, Position, ReqId
from vtoken_conformance.state import Block, Change, Refusal, Request

__all__ = ["Model"]


@dataclass(slots=True)
class _Fenced:
    block: Block
    passed: bool = False


class Model:
    """All requests of one pool under SPEC chapters 1 (T), 3 (C), 4 (R) and 5 (Q)."""

    def __init__(self, spec: KVSpec) -> None:
        self.spec = spec
        self.requests: dict[ReqId, Request] = {}
        self.freed_in_pass: list[Block] = []
        self._fenced: list[_Fenced] = []

    # -- counting ----------------------------------------------------------------------------------------------------

    def num_holders(self, block: Block) -> int:
        """Requests that hold a block."""
        return sum(block in request.blocks for request in self.requests.values())

    def is_private(self, block: Block) -> bool:
        """One holder: it may be written."""
        return self.num_holders(block) == 1

    def held(self) -> list[Block]:
        """Distinct blocks in any request's list."""
        return list(dict.fromkeys(chain.from_iterable(request.blocks for request in self.requests.values())))

    def in_flight(self) -> list[Block]:
        """Blocks in no list that wait behind a fence."""
        return [fenced.block for fenced in self._fenced]

    def due(self) -> list[Block]:
        """Blocks in flight whose fence has passed: ``reap`` may give them back."""
        return [fenced.block for fenced in self._fenced if fenced.passed]

    @property
    def num_free(self) -> int:
        """INV-6: what is neither held nor in flight, the null block apart."""
        return self.spec.num_blocks - 1 - len(self.held()) - len(self._fenced)

    def free_ids(self) -> set[BlockId]:
        """The same by the executor's numbers, once all blocks in use have one."""
        return set(range(1, self.spec.num_blocks)) - {block.block_id for block in [*self.held(), *self.in_flight()]}

    def target_ids(self) -> set[BlockId]:
        """INV-5, R-7: free blocks that copies may go into, none freed in this pass."""
        return self.free_ids() - {block.block_id for block in self.freed_in_pass}

    # -- requests (Q) ------------------------------------------------------------------------------------------------

    def admit(self, req_id: ReqId) -> None:
        """Q-1."""
        self._check_new(req_id)
        self.requests[req_id] = Request()

    def fork_prefix(self, parent_id: ReqId, child_id: ReqId, num_tokens: int) -> None:
        """Q-2, Q-3: the child's rows are its own, its blocks are the parent's."""
        parent = self.known(parent_id)
        size = self.spec.block_size
        if num_tokens < 1 or num_tokens % size or num_tokens > parent.num_computed:
            raise Refusal("Q-2", f"a prefix of {num_tokens} tokens is not a whole number of computed blocks")
        first_places = list(chain.from_iterable(parent.rows))[:num_tokens]
        if first_places != list(range(num_tokens)):
            raise Refusal("Q-2", f"a token of the first {num_tokens} was evicted or moved")
        self._check_new(child_id)
        self.requests[child_id] = Request(
            blocks=parent.blocks[: num_tokens // size],
            rows=[list(row) for row in parent.rows[: num_tokens // size]],
            kv={position: parent.kv[position] for position in range(num_tokens)},
            num_computed=num_tokens,
            cursor=num_tokens,
        )

    def finish(self, req_id: ReqId) -> None:
        """Q-1, R-8; ``preempt`` is the same to the pool (Q-4)."""
        request = self.known(req_id)
        del self.requests[req_id]
        self._let_go(request.blocks, fenced=request.plan_in_flight)

    # -- tokens (T, C) -----------------------------------------------------------------------------------------------

    def append(self, req_id: ReqId, kv: Sequence[bytes]) -> None:
        """T-2, T-5, Q-5: the next positions take the slots from the cursor on."""
        request, size = self.known(req_id), self.spec.block_size
        self._check_kv(kv)
        num_new_blocks = max(0, -(-(request.cursor + len(kv)) // size) - len(request.blocks))
        if num_new_blocks > self.num_free:
            raise Refusal("Q-5", f"{num_new_blocks} blocks are needed, {self.num_free} are free", PoolExhausted)
        for _ in range(num_new_blocks):
            request.blocks.append(Block())
            request.rows.append([None] * size)
        request.num_layout_changes += num_new_blocks > 0
        for data in kv:
            index, offset = divmod(request.cursor, size)
            request.rows[index][offset] = request.num_computed
            request.kv[request.num_computed] = data
            request.num_computed += 1
            request.cursor += 1

    def kill(self, req_id: ReqId, positions: Sequence[Position]) -> list[Position]:
        """T-3: dead at once; returns those that were alive."""
        request = self.known(req_id)
        self._check_computed(request, positions)
        killed = [position for position in dict.fromkeys(positions) if position in request.kv]
        for position in killed:
            self._bury(request, position)
        request.num_liveness_changes += bool(killed)
        return killed

    def doom(self, req_id: ReqId, positions: Sequence[Position]) -> None:
        """T-4."""
        request = self.known(req_id)
        self._check_computed(request, positions)
        for index, position in enumerate(positions):
            if position not in request.kv or position in request.doomed or position in positions[:index]:
                raise Refusal("T-4", f"position {position} is doomed or dead already")
        request.doomed.extend(positions)
        request.num_liveness_changes += bool(positions)

    def next_recyclable(self, req_id: ReqId) -> Position | None:
        """C-3, K-3: the next doomed token, if its slot may be written now."""
        request = self.known(req_id)
        if request.plan_in_flight or not request.doomed:
            return None
        index, _ = request.place_of(request.doomed[0])
        return request.doomed[0] if self.is_private(request.blocks[index]) else None

    def recycle(self, req_id: ReqId, kv: Sequence[bytes]) -> None:
        """C-1: the new token takes the slot of the next doomed one; cursor, blocks and live count stay."""
        request = self.known(req_id)
        self._check_kv(kv)
        victim = self.next_recyclable(req_id)
        if victim is None:
            raise Refusal("C-3", "no doomed token lies in a slot that may be written")
        index, offset = request.place_of(victim)
        self._bury(request, victim)
        request.rows[index][offset] = request.num_computed
        (request.kv[request.num_computed],) = kv
        request.num_computed += 1

    # -- plans and fences (R) ----------------------------------------------------------------------------------------

    def apply(self, req_id: ReqId, change: Change) -> list[Block]:
        """R-2, R-3: commits a change; returns the fresh blocks. What it carries keeps its bytes and its positions."""
        request = self.known(req_id)
        for position in change.moves:
            index, offset = request.place_of(position)
            request.rows[index][offset] = None
        fresh = [Block() for _ in range(change.num_fresh)]
        self._change_blocks(request, change, fresh)
        for position, (target, offset) in change.moves.items():
            block = fresh[target] if isinstance(target, int) else target
            request.rows[request.blocks.index(block)][offset] = position
        request.num_layout_changes += bool(change.moves or change.leaving or change.num_fresh)
        request.plan_in_flight = self.spec.regime == "fenced"
        self._let_go(change.leaving, fenced=request.plan_in_flight)
        return fresh

    def advance(self) -> None:
        """R-7: one engine step has ended."""
        self.freed_in_pass.clear()
        for fenced in self._fenced:
            fenced.passed = True
        for request in self.requests.values():
            request.plan_in_flight = False

    def reap(self, blocks: Iterable[Block]) -> None:
        """R-7: these blocks, all due, are free again."""
        gone = set(blocks)
        self._fenced = [fenced for fenced in self._fenced if fenced.block not in gone]

    # -- parts -------------------------------------------------------------------------------------------------------

    def known(self, req_id: ReqId) -> Request:
        """The request, or the refusal of an unknown id (T-8)."""
        if req_id not in self.requests:
            raise Refusal("T-8", f"request {req_id!r} is not admitted")
        return self.requests[req_id]

    def _check_new(self, req_id: ReqId) -> None:
        if req_id in self.requests:
            raise Refusal("T-8", f"request {req_id!r} is admitted already")
        if len(self.requests) == self.spec.max_num_reqs:
            raise Refusal("T-8", f"all {self.spec.max_num_reqs} request rows are taken")

    def _check_kv(self, kv: Sequence[bytes]) -> None:
        if not kv or any(len(data) != self.spec.token_bytes for data in kv):
            raise Refusal("T-8", f"kv is not a number of tokens of {self.spec.token_bytes} bytes")

    @staticmethod
    def _check_computed(request: Request, positions: Sequence[Position]) -> None:
        for position in positions:
            if not 0 <= position < request.num_computed:
                raise Refusal("T-8", f"position {position} is not computed")

    @staticmethod
    def _bury(request: Request, position: Position) -> None:
        index, offset = request.place_of(position)
        request.rows[index][offset] = None
        del request.kv[position]
        if position in request.doomed:
            request.doomed.remove(position)

    @staticmethod
    def _change_blocks(request: Request, change: Change, fresh: Sequence[Block]) -> None:
        pairs = [pair for pair in zip(request.blocks, request.rows, strict=True) if pair[0] not in change.leaving]
        old_length = len(request.blocks)
        joining: list[tuple[Block, list[Position | None]]] = [(block, [None] * len(request.rows[0])) for block in fresh]
        at = len(pairs) if change.packed else len(pairs) - 1
        pairs[at:at] = joining
        request.blocks = [block for block, _ in pairs]
        request.rows = [row for _, row in pairs]
        if change.packed:
            request.cursor = len(request.kv)
        else:
            request.cursor += (len(pairs) - old_length) * len(request.rows[0])

    def _let_go(self, blocks: Iterable[Block], fenced: bool) -> None:
        for block in blocks:
            if self.num_holders(block):
                continue
            if fenced:
                self._fenced.append(_Fenced(block))
            else:
                self.freed_in_pass.append(block)
