"""Block tables, live words and free flags on the device, in the form that a decode kernel reads (paper §3.2).

Live words are indexed by request and table order, never by block id: a shared block may be alive for one holder and
dead for another.

All tables are views of one int32 array, ``state``. Changes are made in a host copy of it, and staged: ``flush`` brings
the words that changed to the device in one upload, and scatters them in one operation. Whoever reads a table through
its name reads it flushed. The addresses stay, so that a captured graph may read them after an explicit ``flush``.
"""

from collections.abc import Sequence
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vtoken.errors import SpecError
from vtoken.executor import KVSpec
from vtoken.types import NULL_BLOCK_ID, BlockId, cdiv
from vtoken_torch.upload import upload

__all__ = ["DeviceTables"]

_WORD_BITS: Final = 32
_WORD_MASK: Final = 0xFFFFFFFF
_MAX_STAGED: Final = 4096  # changes: where nobody reads the device's tables, they go up now and then all the same

Indices = NDArray[np.int64]


class DeviceTables:
    """Tables of one pool.

    Args:
        spec: shapes.
        device: where they are read.
        max_blocks_per_req: width of a row; the whole pool unless told otherwise, so that one request may hold it all.

    Attributes:
        num_rows_rebuilt: rows that went up whole: a plan, a block more, another request.
        num_incremental: live words that went up alone: appends, kills, recycles within known blocks.
        num_uploads: copies to the device, at most one a flush.
    """

    def __init__(self, spec: KVSpec, device: torch.device, max_blocks_per_req: int | None = None) -> None:
        self.device = device
        self._block_size = spec.block_size
        self._words_per_block = cdiv(spec.block_size, _WORD_BITS)
        self._max_blocks = spec.num_blocks - 1 if max_blocks_per_req is None else max_blocks_per_req
        if self._max_blocks < 1:
            raise SpecError(f"max_blocks_per_req={max_blocks_per_req}: give at least 1")
        shapes = (
            (spec.max_num_reqs, self._max_blocks),
            (spec.max_num_reqs,),
            (spec.max_num_reqs, self._max_blocks, self._words_per_block),
            (spec.num_blocks,),
        )
        sizes = [int(np.prod(shape)) for shape in shapes]
        host = np.zeros(sum(sizes), dtype=np.uint32)
        host[: sizes[0]] = NULL_BLOCK_ID
        self.state = torch.from_numpy(host.view(np.int32).copy()).to(device)
        parts: Sequence[Tensor] = torch.split(self.state, sizes)
        tables: list[Tensor] = [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]
        self._block_table, self._num_blocks, self._live_words, self._free = tables
        self._host = host
        self._first = [sum(sizes[:part]) for part in range(len(sizes))]  # of each table in the state
        self._staged: list[Indices] = []
        self._rebuilt: set[int] = set()
        self._num_staged_words = 0
        self.num_rows_rebuilt = self.num_incremental = self.num_uploads = 0

    # -- writing -----------------------------------------------------------------------------------------------------

    def set_row(self, row: int, block_ids: Sequence[BlockId], live_words: Sequence[int]) -> None:
        """Rewrites a row whole, padding included: nothing of an earlier request stays.

        Raises:
            SpecError: more blocks than a row is wide.
        """
        count = len(block_ids)
        if count > self._max_blocks:
            raise SpecError(
                f"a request holds {count} blocks, max_blocks_per_req={self._max_blocks}: raise it, or evict more"
            )
        host, per_block = self._host, self._words_per_block
        blocks = self._first[0] + row * self._max_blocks
        words = self._first[2] + row * self._max_blocks * per_block
        before = int(host[self._first[1] + row])
        dirty = max(before, count)
        host[blocks : blocks + count] = block_ids
        host[blocks + count : blocks + dirty] = NULL_BLOCK_ID
        host[self._first[1] + row] = count
        host[words : words + count * per_block] = self._pack(live_words)
        host[words + count * per_block : words + dirty * per_block] = 0
        self._rebuilt.add(row)
        self._stage(np.arange(blocks, blocks + dirty))
        self._stage(np.array([self._first[1] + row]))
        self._stage(np.arange(words, words + dirty * per_block))

    def set_words(self, row: int, indices: Sequence[int], live_words: Sequence[int]) -> None:
        """Updates the live words of the blocks at these table indices."""
        if not len(indices):
            return
        first = self._words_of(row, np.asarray(indices, dtype=np.int64))
        places = (first[:, None] + np.arange(self._words_per_block)).reshape(-1)
        self._host[places] = self._pack(live_words)
        self._stage_words(places)

    def append(self, rows: Sequence[int], table_slots: Sequence[int]) -> None:
        """Tokens came alive: one in each of these rows (a row may be named often), within blocks that it has.

        For a whole decode step in one call: no loop over its rows.
        """
        if not len(rows):
            return
        block, offset = np.divmod(np.asarray(table_slots, dtype=np.int64), self._block_size)
        places = self._words_of(np.asarray(rows, dtype=np.int64), block) + offset // _WORD_BITS
        np.bitwise_or.at(self._host, places, np.uint32(1) << (offset % _WORD_BITS).astype(np.uint32))
        self._stage_words(places)

    def set_free(self, block_ids: Sequence[BlockId], free: bool) -> None:
        """Flags blocks as free or not."""
        places = self._first[3] + np.asarray(block_ids, dtype=np.int64)
        self._host[places] = free
        self._stage(places)

    def flush(self) -> None:
        """Brings what changed to the device: one upload, nothing waits for it."""
        if not self._staged:
            return
        places = np.concatenate(self._staged)
        pairs = np.stack([places, self._host[places].view(np.int32).astype(np.int64)])
        places_there, words = upload(pairs, self.device)
        self.state.index_copy_(0, places_there, words.to(torch.int32))
        self.num_uploads += 1
        self.num_rows_rebuilt += len(self._rebuilt)
        self.num_incremental += self._num_staged_words
        self._staged.clear()
        self._rebuilt.clear()
        self._num_staged_words = 0

    # -- reading -----------------------------------------------------------------------------------------------------

    @property
    def block_table(self) -> Tensor:
        """``[max_num_reqs, max_blocks]`` int32, padded with the null block."""
        self.flush()
        return self._block_table

    @property
    def num_blocks(self) -> Tensor:
        """``[max_num_reqs]`` int32."""
        self.flush()
        return self._num_blocks

    @property
    def live_words(self) -> Tensor:
        """``[max_num_reqs, max_blocks, words_per_block]`` int32; bit o % 32 of word o // 32 is slot o."""
        self.flush()
        return self._live_words

    @property
    def free(self) -> Tensor:
        """``[num_blocks]`` int32, 1 or 0."""
        self.flush()
        return self._free

    def live_slots(self, row: int) -> Tensor:
        """Slots of a row's live tokens in physical order, ``[num_live_tokens]`` int64."""
        count = int(self.num_blocks[row])
        blocks = self.block_table[row, :count].to(torch.int64)
        bit = torch.arange(_WORD_BITS, dtype=torch.int32, device=self.device)
        live = (self.live_words[row, :count].unsqueeze(-1) >> bit) & 1  # [count, words_per_block, 32]
        offsets = torch.arange(self._block_size, device=self.device)
        slots = blocks.unsqueeze(1) * self._block_size + offsets  # [count, block_size]
        return slots[live.flatten(1)[:, : self._block_size].bool()]

    def read_row(self, row: int) -> tuple[tuple[BlockId, ...], tuple[int, ...]]:
        """Block ids of a row and one live word for each, as plain integers."""
        count = int(self.num_blocks[row])
        words = tuple(self._unpack(parts) for parts in self.live_words[row, :count].tolist())
        return tuple(self.block_table[row, :count].tolist()), words

    def read_free(self) -> frozenset[BlockId]:
        """Blocks flagged free."""
        return frozenset(self.free.nonzero().flatten().tolist())

    # -- reading the host's copy: nothing waits for the device -------------------------------------------------------

    def most_blocks(self, rows: Sequence[int]) -> int:
        """Blocks of the row that has most of them."""
        return int(self._host[self._first[1] + np.asarray(rows)].max())

    def find_live(self, rows: Sequence[int]) -> tuple[Tensor, list[int]]:
        """Live slots of several rows on the device, ``[total]`` int64, row after row in physical order, and how many
        each has."""
        table, live = self._blocks_of(rows)
        slots = table[..., None] * self._block_size + np.arange(self._block_size)
        return upload(slots[live], self.device), live.sum((1, 2)).tolist()

    def find_blocks(self, rows: Sequence[int]) -> tuple[Indices, Indices] | None:
        """Blocks of several rows, ``[len(rows), most_blocks]``, and how many live tokens each has, ``[len(rows)]``.

        None unless in each row the live tokens, one at least, fill its first slots. Where a row has no live token, a
        block without a hole stands.
        """
        table, live = self._blocks_of(rows)
        flat = live.reshape(len(table), -1)
        if not flat[:, :1].all() or not flat.size or (flat[:, 1:] > flat[:, :-1]).any():
            return None
        counts = flat.sum(1)
        is_held = np.arange(table.shape[1]) < -(-counts[:, None] // self._block_size)
        return np.where(is_held, table, table[counts.argmax(), 0]), counts

    # -- parts -------------------------------------------------------------------------------------------------------

    def _blocks_of(self, rows: Sequence[int]) -> tuple[Indices, NDArray[np.bool_]]:
        """Of several rows the block ids ``[rows, blocks]`` and who is alive, ``[rows, blocks, block_size]``."""
        num_rows, width = len(self._num_blocks), self.most_blocks(rows)
        table = self._host[: self._first[1]].reshape(num_rows, -1)[rows, :width]
        words = self._host[self._first[2] : self._first[3]].reshape(num_rows, self._max_blocks, -1)[rows, :width]
        bits = np.unpackbits(words.astype("<u4", copy=False).view(np.uint8), axis=2, bitorder="little")
        return table.astype(np.int64), bits[..., : self._block_size].view(np.bool_)

    def _words_of(self, rows: "int | Indices", blocks: Indices) -> Indices:
        """Where the live words of these blocks of these rows begin in the state."""
        return self._first[2] + (rows * self._max_blocks + blocks) * self._words_per_block

    def _stage(self, places: Indices) -> None:
        if len(places):
            self._staged.append(places)
            if len(self._staged) == _MAX_STAGED:
                self.flush()

    def _stage_words(self, places: Indices) -> None:
        self._num_staged_words += len(places)
        self._stage(places)

    def _pack(self, live_words: Sequence[int]) -> NDArray[np.uint32]:
        """Their words of 32 bits, the low ones first."""
        size = self._words_per_block * _WORD_BITS // 8
        packed = np.frombuffer(b"".join(word.to_bytes(size, "little") for word in live_words), dtype="<u4")
        return packed.astype(np.uint32, copy=False)

    @staticmethod
    def _unpack(parts: Sequence[int]) -> int:
        return sum((part & _WORD_MASK) << index * _WORD_BITS for index, part in enumerate(parts))
