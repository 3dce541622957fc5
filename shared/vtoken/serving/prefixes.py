"""Shared prefixes: which running request already holds a prompt's leading blocks."""

from collections.abc import Iterable
from dataclasses import dataclass

from vtoken.request_table import RequestTable
from vtoken.serving.requests import Request
from vtoken.token_table import TokenTable

__all__ = ["Parent", "find_parent"]


@dataclass(frozen=True, slots=True)
class Parent:
    """A running request with the same first tokens. ``num_tokens`` whole blocks of them can be shared,
    ``num_soon`` once its prompt is computed."""

    request: Request
    num_tokens: int
    num_soon: int


def find_parent(child: Request, running: Iterable[Request], tables: TokenTable) -> Parent | None:
    """The request with the most to share now or soon; the oldest of equals.

    Only untouched blocks count: every token live and in its first place, so that the parent saw no less when it
    computed their KV than the child would. The child computes at least its last token: its first output follows it.
    """
    size = tables.block_size
    best: Parent | None = None
    for request in running:
        num_common = _num_common_blocks(child, request, size)
        if not num_common:
            continue
        num_computed = min(num_common, request.computed // size)
        num_untouched = _num_untouched_blocks(tables[request.req_id], num_computed)
        grows = num_untouched == num_computed and request.computed < request.prefill_to
        parent = Parent(request, num_untouched * size, (num_common if grows else num_untouched) * size)
        if parent.num_soon and (best is None or parent.num_soon > best.num_soon):
            best = parent
    return best


def _num_common_blocks(child: Request, other: Request, size: int) -> int:
    """Whole blocks of equal tokens at the start of both, the child's last token apart."""
    limit = min(len(child.prompt) - 1, other.num_known) // size
    for index in range(limit):
        start, end = index * size, (index + 1) * size
        if child.prompt[start:end] != other.tokens(start, end):
            return index
    return limit


def _num_untouched_blocks(table: RequestTable, limit: int) -> int:
    """Leading blocks whose tokens are all live and where they were written first."""
    size, positions = table.block_size, table.packed_positions()
    full = (1 << size) - 1
    for index in range(limit):
        start, end = index * size, (index + 1) * size
        if table.live_words[index] != full or list(positions[start:end]) != list(range(start, end)):
            return index
    return limit
