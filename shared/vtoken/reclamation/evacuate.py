"""Planner ``evacuate`` (SPEC R-6; paper §3.3): live tokens of emptying blocks go, in order, into fresh blocks."""

from bisect import bisect_left

from vtoken.errors import SpecError
from vtoken.reclamation.plan import PoolView, ReclamationPlan, TableView, tokens_in
from vtoken.types import Move, cdiv

__all__ = ["EvacuatePlanner"]


class EvacuatePlanner:
    """The paper's planner: ``N_dst = ceil(T_live / block_size)`` targets, made only if ``|B_src| > N_dst``.

    It keeps order among the tokens that it moves, and needs headroom: its targets must be free before its sources are.
    """

    def __init__(self, source_utilization: float = 0.5) -> None:
        if not 0 <= source_utilization < 1:
            raise SpecError(f"source_utilization={source_utilization}: give a share of at least 0 and below 1")
        self.source_utilization = source_utilization

    def plan(self, table: TableView, pool: PoolView) -> ReclamationPlan | None:
        if table.plan_in_flight:
            return None
        counts = self.source_counts(table, pool)
        targets = pool.copy_targets(cdiv(sum(counts.values()), table.block_size))
        if targets is None:
            counts = self._affordable(counts, table.block_size, pool)
            targets = pool.copy_targets(cdiv(sum(counts.values()), table.block_size))
        if targets is None or len(counts) <= len(targets):
            return None
        slots = (block * table.block_size + offset for block in targets for offset in range(table.block_size))
        live = (token for index in counts for token in tokens_in(table, index, table.live_words[index]))
        return ReclamationPlan(
            req_id=table.req_id,
            layout_version=table.layout_version,
            liveness_version=table.liveness_version,
            num_live_tokens=table.num_live_tokens,
            moves=tuple(Move(position, src, dst) for (position, src), dst in zip(live, slots, strict=False)),
            freed_block_ids=tuple(table.block_ids[index] for index in counts),
            new_block_ids=tuple(targets),
        )

    def source_counts(self, table: TableView, pool: PoolView) -> dict[int, int]:
        """Live tokens of each source, by index into the block list, ascending. The tail block is never a source."""
        limit = int(self.source_utilization * table.block_size)
        counts = {}
        for index, word in enumerate(table.live_words[:-1]):
            count = word.bit_count()
            if count <= limit and pool.is_private(table.block_ids[index]):
                counts[index] = count
        return counts

    @staticmethod
    def _affordable(counts: dict[int, int], block_size: int, pool: PoolView) -> dict[int, int]:
        """The emptiest sources whose targets are free."""
        sizes = range(1, cdiv(sum(counts.values()), block_size) + 1)
        num_targets = bisect_left(sizes, True, key=lambda size: pool.copy_targets(size) is None)
        chosen: list[int] = []
        live = 0
        for index in sorted(counts, key=lambda i: (counts[i], i)):
            live += counts[index]
            if live > num_targets * block_size:
                break
            chosen.append(index)
        return {index: counts[index] for index in sorted(chosen)}
