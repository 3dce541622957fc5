"""Where a step's rows differ from vLLM's counts, brought to the device; nothing waits for it."""

from abc import ABC, abstractmethod
from array import array
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import torch
from vllm.v1.worker.gpu.buffer_utils import UvaBufferPool

from vtoken.types import ReqId
from vtoken_torch.vllm_plugin.record import Recycles
from vtoken_torch.vllm_plugin.worker_side import WorkerSide

__all__ = ["DeviceRows", "HostRows", "StepRows"]


class StepRows(ABC):
    """Dead tokens of every row, and where the tokens go that are written over dead ones. Valid until the next step.

    Attributes:
        dead_on_host: ``[num_rows]`` int64: packed index = position - that many. A recycled token has counted the dead
            one under it.
    """

    dead_on_host: np.ndarray

    @staticmethod
    def on(device: torch.device, max_num_reqs: int, max_num_tokens: int, max_concurrent_steps: int) -> "StepRows":
        """The kind for this device."""
        if device.type == "cpu":
            return HostRows(max_num_reqs, max_num_tokens)
        return DeviceRows(max_num_reqs, max_concurrent_steps)

    @property
    @abstractmethod
    def dead(self) -> torch.Tensor:
        """``dead_on_host`` on the device."""

    @property
    @abstractmethod
    def num_recycled(self) -> int:
        """Tokens of the step that are written over dead ones."""

    @abstractmethod
    def stage(
        self, side: WorkerSide, req_ids: Sequence[ReqId], counts: np.ndarray, starts: np.ndarray, num_tokens: int
    ) -> None:
        """``counts[i]``: computed tokens of row i before the step. ``starts[i]``: index of its first token among the
        ``num_tokens`` of the batch.
        """

    @abstractmethod
    def packed(self, positions: torch.Tensor, rows: Any) -> torch.Tensor:
        """``positions`` ``[num_tokens]`` int64 less the dead tokens of each one's row.

        ``rows``: vLLM's buffer with the row of each token; not read where each row has one.
        """

    @abstractmethod
    def shorten(self, lengths: torch.Tensor, on_host: torch.Tensor) -> None:
        """Takes the dead tokens off ``lengths`` and ``on_host`` ``[at least num_rows]`` int32, in place."""

    @abstractmethod
    def aim(self, slot_mapping: torch.Tensor) -> None:
        """Writes the slots of tokens that go over dead ones into ``slot_mapping`` ``[at least num_tokens]`` int64."""


_NO_SLOTS: Final = array("q")


class _Rows:
    """What a side has said of the requests in each row, as arrays, and what follows from it at given counts.

    A step costs few calls of NumPy: between two steps of a model all caches are cold, and each call takes longer than
    its arithmetic.

    Attributes:
        goes_on: this step is the last one over again, every count and every number of dead tokens one higher.
        dead: ``[max_num_reqs]`` int64, of the step; those of a recycled token's victim are among them.
    """

    def __init__(self, max_num_reqs: int) -> None:
        self.goes_on = False
        self._moving = np.zeros((2, max_num_reqs), dtype=np.int64)  # what goes up in each step that goes on
        self.dead, self._index = self._moving  # the index: into all of ``_slots``
        self._req_ids: list[ReqId] = []
        self._row_of: dict[ReqId, int] = {}
        self._num_dead = np.zeros(max_num_reqs, dtype=np.int64)
        self._first = np.zeros(max_num_reqs, dtype=np.int64)
        self._length = np.zeros(max_num_reqs, dtype=np.int64)
        self._slots = np.zeros((max_num_reqs, 1), dtype=np.int64)
        self._first_index = np.arange(max_num_reqs)  # of each row in all of ``_slots``
        self._num_left = 0  # steps to come in which all rows recycle, if each is given its token
        self._next_count = 0  # of the first row in such a step

    def at(
        self, side: WorkerSide, req_ids: Sequence[ReqId], counts: np.ndarray
    ) -> tuple[np.ndarray | slice, np.ndarray]:
        """Rows whose token goes over a dead one, and the slots that it goes to; ``dead`` is counted.

        Where the last step had the same requests, and all of them recycled, each has one token more.
        """
        if req_ids == self._req_ids:
            told = [self._row_of[req_id] for req_id in side.changed if req_id in self._row_of]
        else:
            self._req_ids = list(req_ids)
            self._row_of = {req_id: row for row, req_id in enumerate(req_ids)}
            self._num_left, told = 0, list(range(len(req_ids)))
        for row in told:
            req_id = self._req_ids[row]
            self._write(row, side.recycles.get(req_id) or Recycles(0, side.num_dead(req_id), _NO_SLOTS))
        side.changed.clear()
        if self._num_left > 0:
            for row in told:
                self._rejoin(row, int(counts[row]))
        self.goes_on = self._num_left > 0 and counts[0] == self._next_count
        if self.goes_on:
            self._num_left -= 1
            self._next_count += 1
            self._moving[:, : len(counts)] += 1
            self.goes_on = not told
            return slice(len(counts)), self._slots.ravel()[self._index[: len(counts)]]
        return self._find(counts)

    def _rejoin(self, row: int, count: int) -> None:
        """A row that something was said of, as if it had recycled in the last step; ``_num_left`` tells if it will."""
        done = count - self._first[row]
        self._index[row] = self._first_index[row] + done - 1
        self.dead[row] = self._num_dead[row] + done
        self._num_left = min(self._num_left, int(self._length[row] - done) if done >= 0 else 0)

    def _find(self, counts: np.ndarray) -> tuple[np.ndarray | slice, np.ndarray]:
        num_rows = len(counts)
        length, first_index = self._length[:num_rows], self._first_index[:num_rows]
        done = counts - self._first[:num_rows]
        is_inside = (done >= 0) & (done < length)
        np.add(self._num_dead[:num_rows], np.clip(done + 1, 0, length), out=self.dead[:num_rows])
        self._num_left = 0
        if is_inside.all():
            np.add(first_index, done, out=self._index[:num_rows])
            self._num_left, self._next_count = int((length - done).min()) - 1, int(counts[0]) + 1
            return slice(num_rows), self._slots.ravel()[self._index[:num_rows]]
        rows = is_inside.nonzero()[0]
        return rows, self._slots[rows, done[rows]]

    def _write(self, row: int, recycles: Recycles) -> None:
        self._num_dead[row], self._first[row] = recycles.num_dead, recycles.first
        length = self._length[row] = len(recycles.slots)
        if length > self._slots.shape[1]:
            self._slots = np.pad(self._slots, ((0, 0), (0, length - self._slots.shape[1])))
            self._first_index = np.arange(len(self._slots)) * self._slots.shape[1]
            self._num_left = 0
        self._slots[row, :length] = recycles.slots


class DeviceRows(StepRows):
    """Any device. One copy brings it all.

    vLLM's own pinned buffers carry it, one for each step that may be in flight: the host never overwrites what a
    device still reads, and no address of a captured graph is involved.
    """

    _dead: torch.Tensor
    _tokens: torch.Tensor
    _slots: torch.Tensor

    def __init__(self, max_num_reqs: int, max_concurrent_steps: int) -> None:
        self._rows = _Rows(max_num_reqs)
        self._host = np.zeros(3 * max_num_reqs, dtype=np.int64)
        self._pool = UvaBufferPool(3 * max_num_reqs, torch.int64, max(2, max_concurrent_steps))

    @property
    def dead(self) -> torch.Tensor:
        return self._dead

    @property
    def num_recycled(self) -> int:
        return len(self._slots)

    def stage(
        self, side: WorkerSide, req_ids: Sequence[ReqId], counts: np.ndarray, starts: np.ndarray, num_tokens: int
    ) -> None:
        num_rows = len(req_ids)
        rows, slots = self._rows.at(side, req_ids, counts)
        self.dead_on_host = self._rows.dead[:num_rows]
        num_recycled = len(slots)
        host = self._host[: num_rows + 2 * num_recycled]
        host[:num_rows] = self.dead_on_host
        host[num_rows : num_rows + num_recycled] = starts[:num_rows][rows]
        host[num_rows + num_recycled :] = slots
        parts = self._pool.copy_to_uva(host).split_with_sizes((num_rows, num_recycled, num_recycled))
        self._dead, self._tokens, self._slots = parts

    def packed(self, positions: torch.Tensor, rows: Any) -> torch.Tensor:
        num_tokens, dead = len(positions), self._dead
        return positions - (dead if num_tokens == len(dead) else dead[rows.gpu[:num_tokens]])

    def shorten(self, lengths: torch.Tensor, on_host: torch.Tensor) -> None:
        num_rows = len(self.dead_on_host)
        host = on_host.numpy()[:num_rows]
        host -= self.dead_on_host
        lengths[:num_rows].sub_(self._dead)

    def aim(self, slot_mapping: torch.Tensor) -> None:
        slot_mapping.index_copy_(0, self._tokens, self._slots)


class HostRows(StepRows):
    """The CPU, whose tensors are host memory: arithmetic on arrays that share it, which takes no operator call.

    A step is done when vLLM's call returns, so that one buffer serves all steps.
    """

    def __init__(self, max_num_reqs: int, max_num_tokens: int) -> None:
        self._rows = _Rows(max_num_reqs)
        self._dead = torch.from_numpy(self._rows.dead)
        self._all_packed = torch.zeros(max_num_tokens, dtype=torch.int64)
        self._packed = self._all_packed[:0]  # as many as the last step had
        self._packed_array = self._packed.numpy()
        self._lengths, self._lengths_on_host, self._slot_mapping = _Memory(), _Memory(), _Memory()

    @property
    def dead(self) -> torch.Tensor:
        return self._dead[: len(self.dead_on_host)]

    @property
    def num_recycled(self) -> int:
        return len(self._slots)

    def stage(
        self, side: WorkerSide, req_ids: Sequence[ReqId], counts: np.ndarray, starts: np.ndarray, num_tokens: int
    ) -> None:
        num_rows = len(req_ids)
        rows, self._slots = self._rows.at(side, req_ids, counts)
        self.dead_on_host = self._rows.dead[:num_rows]
        self._tokens = rows if num_tokens == num_rows else starts[:num_rows][rows]

    def packed(self, positions: torch.Tensor, rows: Any) -> torch.Tensor:
        if self._rows.goes_on:
            return self._packed  # a position and its dead tokens go up together
        num_tokens, dead = len(positions), self.dead_on_host
        if num_tokens > len(dead):
            dead = dead[rows.np[:num_tokens]]
        if len(self._packed_array) != num_tokens:
            self._packed = self._all_packed[:num_tokens]
            self._packed_array = self._packed.numpy()
        np.subtract(positions.numpy(), dead, out=self._packed_array)
        return self._packed

    def shorten(self, lengths: torch.Tensor, on_host: torch.Tensor) -> None:
        dead = self.dead_on_host
        for each in (self._lengths.of(lengths)[: len(dead)], self._lengths_on_host.of(on_host)[: len(dead)]):
            each -= dead

    def aim(self, slot_mapping: torch.Tensor) -> None:
        self._slot_mapping.of(slot_mapping)[self._tokens] = self._slots


class _Memory:
    """Of a tensor that is mostly the same one."""

    _tensor: torch.Tensor | None = None

    def of(self, tensor: torch.Tensor) -> np.ndarray:
        if tensor is not self._tensor:
            self._tensor, self._array = tensor, tensor.numpy()
        return self._array
