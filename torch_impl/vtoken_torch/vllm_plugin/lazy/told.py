"""What a worker was told of dead slots, by request."""

from collections.abc import Iterable

import numpy as np
import torch

from vtoken.types import ReqId
from vtoken_torch.vllm_plugin.record import LiveWords, StepRecord

__all__ = ["ToldSlots"]


class ToldSlots:
    """Follows the records. A request of which nothing was said has no dead slot."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._is_dead: dict[ReqId, np.ndarray] = {}  # bool by slot, in table order; slots behind are live
        self._dead: dict[ReqId, torch.Tensor] = {}

    def __len__(self) -> int:
        """Requests with dead slots."""
        return len(self._dead)

    def dead(self, req_id: ReqId) -> torch.Tensor | None:
        """Dead slots of a request as indices in table order: int64 ``[num_dead]``, ascending; None if it has none."""
        return self._dead.get(req_id)

    def forget(self, req_ids: Iterable[ReqId]) -> None:
        """These are gone, or begin from nothing."""
        for req_id in req_ids:
            self._is_dead.pop(req_id, None)
            self._dead.pop(req_id, None)

    def take(self, record: StepRecord) -> None:
        """What this step's record says. A block list that a plan changed comes with words of its own."""
        self.forget(record.block_ids)
        for req_id, told in record.live_words.items():
            if not told.words:
                self.forget([req_id])
                continue
            is_dead = self._is_dead.get(req_id, np.zeros(0, dtype=np.bool_))
            start, end = (index * self._block_size for index in (told.first, told.first + len(told.words)))
            if end > len(is_dead):
                is_dead = np.pad(is_dead, (0, end - len(is_dead)))
            is_dead[start:end] = self._unpacked(told)
            self._is_dead[req_id] = is_dead
            dead = np.flatnonzero(is_dead)
            if len(dead):
                self._dead[req_id] = torch.from_numpy(dead)
            else:
                self._dead.pop(req_id, None)

    def _unpacked(self, told: LiveWords) -> np.ndarray:
        """Whether each slot of these blocks is dead."""
        num_bytes = -(-self._block_size // 8)
        packed = b"".join(word.to_bytes(num_bytes, "little") for word in told.words)
        bits = np.unpackbits(np.frombuffer(packed, dtype=np.uint8), bitorder="little")
        is_dead: np.ndarray = bits.reshape(-1, num_bytes * 8)[:, : self._block_size] == 0
        return is_dead.ravel()
