"""The workers' half of verification: fingerprints of KV in vLLM's cache, in stream order (INV-1, 2, 3, 8)."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from vllm.distributed import get_tp_group

from vtoken.invariants import Violation, check_conservation
from vtoken.types import Move, Position, ReqId, SlotId
from vtoken_torch.fingerprint import kv_fingerprints, sequence_sums
from vtoken_torch.vllm_plugin.parts import WorkerPart
from vtoken_torch.vllm_plugin.record import StepRecord
from vtoken_torch.vllm_plugin.verify.changes import FINDINGS, Changes, Finding, PassChanges
from vtoken_torch.vllm_plugin.verify.visibility import StepOrder

if TYPE_CHECKING:
    from vtoken_torch.vllm_plugin.worker_side import WorkerSide

__all__ = ["Fingerprints"]

_NOWHERE = -1
_CHUNK_BYTES = 1 << 25
_CANARY = 0x1234
"""16-bit pattern laid into the slots that a step is to write; a finite number in every dtype of a cache."""


class _Known:
    """One request's tokens: where each lies, and the fingerprint of its KV since it was written.

    Attributes:
        slots: ``[capacity]`` int64 by position; -1 is a dead token, or none.
        prints: ``[2, capacity]`` int64, fingerprints of tokens under both salts.
        num_left_out: dead tokens that the worker must leave out of lengths and slots.
    """

    def __init__(self) -> None:
        self.slots = torch.full((64,), _NOWHERE, dtype=torch.int64)
        self.prints = torch.zeros(2, 64, dtype=torch.int64)
        self.num_left_out = 0

    def live(self) -> Tensor:
        """Live positions, ascending."""
        return (self.slots != _NOWHERE).nonzero().flatten()

    def apply(self, made: Changes) -> None:
        """One pass. Fingerprints of its new tokens follow after the forward."""
        self.slots[made.dead] = _NOWHERE
        self.num_left_out = made.num_left_out
        for position, _, dst in made.moves:
            self.slots[position] = dst
        end = made.first_new + len(made.new_slots)
        if end > len(self.slots):
            more = max(end, 2 * len(self.slots)) - len(self.slots)
            self.slots = torch.nn.functional.pad(self.slots, (0, more), value=_NOWHERE)
            self.prints = torch.nn.functional.pad(self.prints, (0, more))
        self.slots[made.first_new : end] = torch.tensor(made.new_slots, dtype=torch.int64)

    def sum(self, positions: Tensor) -> Tensor:
        """Their part of the sequence fingerprint as it should be, ``[2]``."""
        return sequence_sums(self.prints[:, positions], positions)


class Fingerprints(WorkerPart):
    """Holds KV in the cache against what was written there.

    A relocation: each moved token's fingerprint before it, since it was written, and after it must be one. A recycle:
    the request's whole sequence is read after the forward; it must be the sequence before, less what died, plus what is
    new. Every new token must have reached its slot. One finding makes the worker read all that it knows of, so that
    a stray write is found in the request that it hit, in the same step.
    """

    def __init__(self, side: "WorkerSide") -> None:
        self._side = side
        self._known: dict[ReqId, _Known] = {}
        self._changes = PassChanges()
        self._before: dict[ReqId, dict[Position, tuple[int, int]]] = {}
        self._sums: dict[ReqId, Tensor] = {}
        self._findings: list[Finding] = []
        self._order = StepOrder(lambda: side.num_moved_tokens)
        self._canary_print: Tensor | None = None

    # -- in stream order ---------------------------------------------------------------------------------------------

    def before_moves(self, record: StepRecord) -> None:
        """Reads what is about to be moved."""
        self._findings += self._order.begins(record)
        self._changes = record.verify or PassChanges()
        for req_id in self._changes.gone:
            self._known.pop(req_id, None)
        for req_id, made in self._changes.requests.items():
            if made.is_start:
                self._known[req_id] = _Known()
        self._before = self._read_moved(lambda move: move.src_slot)
        for req_id, found in self._before.items():
            prints = self._known[req_id].prints[:, list(found)].t().tolist()
            written = dict(zip(found, map(tuple, prints), strict=True))
            self._check_kept(req_id, written, found, "before its copy")

    def after_moves(self, record: StepRecord) -> None:
        """Reads it again where it must be, before anything is written; lays canaries where this step writes."""
        self._findings += self._order.copied(record)
        after = self._read_moved(lambda move: move.dst_slot)
        for req_id, found in after.items():
            self._check_kept(req_id, self._before[req_id], found, "after its copy")
        recycled = self._changes.recycled
        self._sums = {}
        for req_id, made in self._changes.requests.items():
            known = self._known[req_id]
            known.apply(made)
            if req_id in recycled:
                survivors = known.live()
                self._sums[req_id] = known.sum(survivors[survivors < made.first_new])
        to_write = [slot for made in self._changes.requests.values() for slot in made.new_slots[made.num_cached :]]
        if to_write:
            self._side.mover.fill(to_write, _CANARY)

    def before_forward(self, req_ids: Sequence[ReqId]) -> None:
        self._order.forward(req_ids)

    def after_forward(self, req_ids: Sequence[ReqId], result: Any) -> None:
        """Takes the new tokens in, and checks the sequences that a recycle changed."""
        self._order.forward(())
        self._take_in_new()
        self._check_recycled()
        self._check_counts(req_ids)
        if self._findings:
            self._read_all()
        findings, self._findings = _of_all_ranks(self._findings), []
        if findings:
            setattr(result, FINDINGS, findings)

    # -- reading -----------------------------------------------------------------------------------------------------

    def _prints(self, slots: Sequence[SlotId]) -> Tensor:
        """Fingerprints of what lies in these slots, ``[2, len(slots)]``."""
        mover, found = self._side.mover, []
        step = max(1, _CHUNK_BYTES // mover.token_bytes)
        for first in range(0, len(slots), step):
            found.append(kv_fingerprints(mover.read(slots[first : first + step])))
        return torch.cat(found, 1) if found else torch.zeros(2, 0, dtype=torch.int64)

    def _read_moved(self, slot_of: Callable[[Move], SlotId]) -> dict[ReqId, dict[Position, tuple[int, int]]]:
        """Fingerprints of the pass's moved tokens at one end of their moves, by request and position."""
        moves = [(req_id, move) for req_id, made in self._changes.requests.items() for move in made.moves]
        found: dict[ReqId, dict[Position, tuple[int, int]]] = {}
        prints = self._prints([slot_of(move) for _, move in moves]).t().tolist()
        for (req_id, move), (low, high) in zip(moves, prints, strict=True):
            found.setdefault(req_id, {})[move.position] = (low, high)
        return found

    def _take_in_new(self) -> None:
        new = [(req_id, made) for req_id, made in self._changes.requests.items() if made.new_slots]
        prints = self._prints([slot for _, made in new for slot in made.new_slots])
        nothing = self._canary() if new else prints
        start = 0
        for req_id, made in new:
            end = start + len(made.new_slots)
            self._known[req_id].prints[:, made.first_new : made.first_new + end - start] = prints[:, start:end]
            untouched = (prints[:, start + made.num_cached : end] == nothing).all(0).nonzero().flatten().tolist()
            for index in untouched[:1]:
                position, slot = made.first_new + made.num_cached + index, made.new_slots[made.num_cached + index]
                what = f"KV of position {position} in slot {slot}"
                self._find(Finding(2, req_id, what, "written by the step", "never written", (slot,)))
            start = end

    def _canary(self) -> Tensor:
        """Fingerprint of a slot that nothing was written to since the canary, ``[2, 1]``."""
        if self._canary_print is None:
            words = torch.full((1, self._side.mover.token_bytes // 2), _CANARY, dtype=torch.int16)
            self._canary_print = kv_fingerprints(words)
        return self._canary_print

    # -- checking ----------------------------------------------------------------------------------------------------

    def _check_kept(
        self,
        req_id: ReqId,
        expected: dict[Position, tuple[int, int]],
        found: dict[Position, tuple[int, int]],
        when: str,
    ) -> None:
        try:
            check_conservation(req_id, expected, found)
        except Violation as violation:
            moves = [m for m in self._changes.requests[req_id].moves if expected[m.position] != found[m.position]]
            slots = tuple(slot for move in moves for slot in (move.src_slot, move.dst_slot))
            self._find(replace(Finding.of(violation), what=f"fingerprint of {violation.where} {when}", slots=slots))

    def _check_recycled(self) -> None:
        """After = before - victim + new, over the whole sequence of each request that recycled."""
        positions = {req_id: self._known[req_id].live() for req_id in self._sums}
        slots = [self._known[req_id].slots[live] for req_id, live in positions.items()]
        prints = self._prints(torch.cat(slots).tolist() if slots else [])
        sizes = [len(live) for live in positions.values()]
        for (req_id, live), found in zip(positions.items(), torch.split(prints, sizes, 1), strict=True):
            new = live[live >= self._changes.requests[req_id].first_new]
            expected = (self._sums[req_id] + self._known[req_id].sum(new)) & 0xFFFFFFFF
            if not torch.equal(expected, sequence_sums(found, live)):
                self._compare(req_id, live, found)

    def _check_counts(self, req_ids: Sequence[ReqId]) -> None:
        if not self._side.any_evicted or not req_ids:
            return
        for req_id, num_dead in zip(req_ids, self._side.runner.rows.dead_on_host.tolist(), strict=True):
            if req_id in self._changes.requests and num_dead != self._known[req_id].num_left_out:
                what = "dead tokens that the worker leaves out"
                self._find(Finding(8, req_id, what, str(self._known[req_id].num_left_out), str(num_dead)))

    def _read_all(self) -> None:
        """Every live token of every request: what was hit beside the one that was found?"""
        for req_id, known in self._known.items():
            if all(finding.req_id != req_id for finding in self._findings):
                positions = known.live()
                self._compare(req_id, positions, self._prints(known.slots[positions].tolist()))

    def _compare(self, req_id: ReqId, positions: Tensor, prints: Tensor) -> None:
        known = self._known[req_id]
        changed = positions[(known.prints[:, positions] != prints).any(0)].tolist()
        if changed:
            index = positions.tolist().index(changed[0])
            expected, found = known.prints[:, changed[0]].tolist(), prints[:, index].tolist()
            what = f"fingerprint of position {changed[0]} (of {len(changed)} that changed) after the forward"
            slots = tuple(known.slots[changed].tolist())
            self._find(Finding(1, req_id, what, str(tuple(expected)), str(tuple(found)), slots))

    def _find(self, finding: Finding) -> None:
        self._findings.append(finding)


def _of_all_ranks(findings: list[Finding]) -> list[Finding]:
    """Each rank of tensor parallelism sees its own heads alone; rank 0's result is the one that travels."""
    group = get_tp_group()
    if group.world_size == 1:
        return findings
    gathered: list[list[Finding]] = [[] for _ in range(group.world_size)]
    torch.distributed.all_gather_object(gathered, findings, group=group.cpu_group)
    return [finding for each in gathered for finding in each]
