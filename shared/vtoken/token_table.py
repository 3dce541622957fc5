"""The token table of all requests (paper §3.2): the line between logical positions and physical slots."""

from collections.abc import Iterator, Mapping

from vtoken.errors import SpecError
from vtoken.request_table import RequestTable
from vtoken.types import BlockId, ReqId

__all__ = ["TokenTable"]


class TokenTable(Mapping[ReqId, RequestTable]):
    """Request tables by request id. An unknown id is a SpecError that names it."""

    def __init__(self, block_size: int) -> None:
        if block_size < 1:
            raise SpecError(f"block_size={block_size}: give at least 1")
        self.block_size = block_size
        self._tables: dict[ReqId, RequestTable] = {}

    def __getitem__(self, req_id: ReqId) -> RequestTable:
        try:
            return self._tables[req_id]
        except KeyError:
            raise SpecError(f"request {req_id!r} is not in the token table: admit it first") from None

    def __contains__(self, req_id: object) -> bool:
        return req_id in self._tables

    def __iter__(self) -> Iterator[ReqId]:
        return iter(self._tables)

    def __len__(self) -> int:
        return len(self._tables)

    def add(self, req_id: ReqId) -> RequestTable:
        """Registers an empty request."""
        if req_id in self._tables:
            raise SpecError(f"request {req_id!r} is in the token table already: finish or preempt it first")
        table = self._tables[req_id] = RequestTable(req_id, self.block_size)
        return table

    def pop(self, req_id: ReqId) -> RequestTable:
        """Removes a request and returns its table; its blocks are the caller's to free."""
        table = self[req_id]
        del self._tables[req_id]
        return table

    def prefix_blocks(self, req_id: ReqId, num_tokens: int) -> list[BlockId]:
        """The leading blocks of a request that hold exactly its first ``num_tokens`` tokens, all live and in place.

        Whole blocks only, as in vLLM's prefix cache: a partly filled block would be written by both holders.
        """
        table = self[req_id]
        num_blocks, rest = divmod(num_tokens, self.block_size)
        if rest or not 0 < num_tokens <= table.num_computed_tokens:
            raise SpecError(
                f"prefix of {num_tokens} tokens of request {req_id!r}: give a multiple of block_size={self.block_size} "
                f"between 1 and its {table.num_computed_tokens} computed tokens"
            )
        for position in range(num_tokens):
            if not table.is_live(position) or table.table_slot_of(position) != position:
                raise SpecError(
                    f"prefix of {num_tokens} tokens of request {req_id!r}: position {position} was evicted or moved, "
                    f"so that its block no longer holds the prefix; "
                    f"share at most {position // self.block_size * self.block_size} tokens"
                )
        return table.block_ids[:num_blocks]
