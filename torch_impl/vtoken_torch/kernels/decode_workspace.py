"""Scratch memory that the launches of decode attention share."""

from typing import Final

import torch
from torch import Tensor

from vtoken.errors import SpecError
from vtoken.types import cdiv
from vtoken_torch.kernels.decode_tile import MIN_TILE, Tile

__all__ = ["MAX_SPLITS", "DecodeWorkspace"]

MAX_SPLITS: Final = 64
"""One program reduces all splits of a query head at once."""

_PROGRAMS_PER_MULTIPROCESSOR: Final = 4  # as many as registers and shared memory admit


class DecodeWorkspace:
    """Scratch of ``paged_decode``, allocated once: no call allocates, and a captured graph keeps its addresses.

    One workspace serves all layers of one stream, in order; launches on two streams need one each.

    Args:
        max_num_reqs: rows of the largest batch, padding included.
        num_query_heads, num_kv_heads, head_size: of one layer on this device.
        max_tokens: slots in the longest row of the block table: its width times the block size.
        device: the pool's.
        with_logits: keep logits, which ``token_mass`` needs.
        num_splits: programs that share one request's tokens; None: as many as fill the device at each batch size.
            A fixed number makes a request's result independent of the batch around it.
        tile: None: ``choose_tile``.

    Attributes:
        parts: ``[capacity, head_size]`` float32, the outputs of the splits; capacity is the largest
            ``num_reqs * num_query_heads * num_splits``.
        part_lse: ``[capacity]`` float32, log of the sum of exponentials of each split; -inf: nothing alive.
        lse: ``[max_num_reqs, num_query_heads]`` float32, of whole requests.
        logits: ``[max_num_reqs, num_query_heads, max_tokens]`` float32 or None; scaled, -inf at dead slots, undefined
            past a request's blocks.

    Raises:
        SpecError: a size below 1, or heads that are no multiple of KV heads.
    """

    def __init__(
        self,
        max_num_reqs: int,
        num_query_heads: int,
        num_kv_heads: int,
        head_size: int,
        max_tokens: int,
        device: torch.device,
        *,
        with_logits: bool = False,
        num_splits: int | None = None,
        tile: Tile | None = None,
    ) -> None:
        _check_sizes(max_num_reqs, num_query_heads, num_kv_heads, head_size, max_tokens, num_splits)
        self.max_num_reqs, self.max_tokens = max_num_reqs, max_tokens
        self.num_query_heads, self.num_kv_heads, self.head_size = num_query_heads, num_kv_heads, head_size
        self.device = device
        self.tile = tile
        self._fixed_splits = num_splits
        self._wanted_programs = _PROGRAMS_PER_MULTIPROCESSOR * _num_multiprocessors(device)
        rows = max(num_reqs * self.num_splits(num_reqs) for num_reqs in range(1, max_num_reqs + 1))
        self.parts = self._floats(rows * num_query_heads, head_size)
        self.part_lse = self._floats(rows * num_query_heads)
        self.lse = self._floats(max_num_reqs, num_query_heads)
        self.logits = self._floats(max_num_reqs, num_query_heads, max_tokens) if with_logits else None

    def num_splits(self, num_reqs: int) -> int:
        """Programs that share one request's tokens in a batch of this many rows."""
        if self._fixed_splits is not None:
            return self._fixed_splits
        wanted = cdiv(self._wanted_programs, num_reqs * self.num_kv_heads)
        return max(1, min(wanted, MAX_SPLITS, self.max_tokens // MIN_TILE))

    def _floats(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.float32, device=self.device)


def _check_sizes(
    max_num_reqs: int, num_query_heads: int, num_kv_heads: int, head_size: int, max_tokens: int, num_splits: int | None
) -> None:
    if min(max_num_reqs, num_query_heads, num_kv_heads, head_size, max_tokens) < 1:
        sizes = (max_num_reqs, num_query_heads, num_kv_heads, head_size, max_tokens)
        raise SpecError(f"a decode workspace of sizes {sizes}: give at least 1 for each")
    if num_query_heads % num_kv_heads:
        raise SpecError(
            f"num_query_heads={num_query_heads} is no multiple of num_kv_heads={num_kv_heads}: "
            "every KV head serves the same number of query heads (GQA)"
        )
    if num_splits is not None and not 1 <= num_splits <= MAX_SPLITS:
        raise SpecError(f"num_splits={num_splits}: give 1 to {MAX_SPLITS}, or None")


def _num_multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
