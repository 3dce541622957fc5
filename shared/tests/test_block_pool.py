from collections import Counter

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from vtoken.block_pool import BlockPool
from vtoken.errors import PoolExhausted, SpecError


def test_a_new_pool_is_free_but_for_the_null_block() -> None:
    pool = BlockPool(5)
    assert pool.free_block_ids() == [1, 2, 3, 4]
    assert (pool.num_free, pool.num_held, pool.num_in_flight, pool.free_share) == (4, 0, 0, 1.0)


def test_a_pool_of_the_null_block_alone_is_refused() -> None:
    with pytest.raises(SpecError, match="num_blocks=1: give at least 2"):
        BlockPool(1)


def test_the_block_freed_first_is_taken_first() -> None:
    pool = BlockPool(5)
    assert pool.allocate(2) == [1, 2]
    assert pool.free([2, 1]) == [2, 1]
    assert pool.allocate(4) == [3, 4, 2, 1]


def test_an_exhausted_pool_raises_says_the_numbers_and_gives_nothing() -> None:
    pool = BlockPool(5)
    pool.free(pool.allocate(1), fence=1)
    with pytest.raises(PoolExhausted, match=r"4 blocks are needed, 3 of 4 are free \(1 in flight\)"):
        pool.allocate(4)
    assert pool.free_block_ids() == [2, 3, 4]


def test_a_shared_block_is_free_when_its_last_holder_lets_go() -> None:
    pool = BlockPool(5)
    pool.allocate(2)
    pool.share([1])
    assert pool.ref_cnt(1) == 2
    assert pool.free([1, 2]) == [2]
    assert pool.num_held == 1
    assert pool.free([1]) == [1]
    assert pool.num_held == 0


@pytest.mark.parametrize("blocks", [[3], [0], [1, 1]])
def test_letting_go_of_more_than_is_held_is_refused_and_changes_nothing(blocks: list[int]) -> None:
    pool = BlockPool(5)
    pool.allocate(2)
    with pytest.raises(SpecError, match="free: block"):
        pool.free([2, *blocks])
    assert (pool.ref_cnt(1), pool.ref_cnt(2), pool.num_free) == (1, 1, 2)


def test_only_a_held_block_can_be_shared_or_hashed() -> None:
    pool = BlockPool(5)
    with pytest.raises(SpecError, match="share: block 3 is held by 0 tables"):
        pool.share([3])
    with pytest.raises(SpecError, match="set_hashed: block 3 is held by 0 tables"):
        pool.set_hashed(3, True)
    assert pool.num_free == 4


def test_a_private_block_has_one_holder_and_no_hash() -> None:
    pool = BlockPool(5)
    pool.allocate(1)
    assert pool.is_private(1)
    assert not pool.is_private(2)
    pool.set_hashed(1, True)
    assert not pool.is_private(1)
    pool.set_hashed(1, False)
    pool.share([1])
    assert not pool.is_private(1)


def test_a_hash_ends_with_the_last_holder() -> None:
    pool = BlockPool(2)
    pool.allocate(1)
    pool.set_hashed(1, True)
    pool.free([1])
    assert pool.allocate(1) == [1]
    assert pool.is_private(1)


def test_a_fenced_block_is_not_handed_out_before_its_fence_has_passed() -> None:
    pool = BlockPool(3)
    pool.allocate(2)
    assert pool.free([1, 2], fence=2) == []
    assert (pool.num_free, pool.num_in_flight, pool.fenced_block_ids()) == (0, 2, [1, 2])
    assert pool.reap(1) == []
    with pytest.raises(PoolExhausted):
        pool.allocate(1)
    assert pool.reap(2) == [1, 2]
    assert pool.allocate(2) == [1, 2]


def test_a_block_freed_in_this_pass_may_be_allocated_but_is_no_copy_target() -> None:
    pool = BlockPool(4)
    pool.allocate(2)
    pool.free([1])
    assert pool.copy_targets(1) == [3]
    assert pool.copy_targets(2) is None
    with pytest.raises(SpecError, match=r"blocks \[1\] are not free, were freed in this pass"):
        pool.take([3, 1])
    assert pool.free_block_ids() == [3, 1]
    pool.begin_pass()
    assert pool.copy_targets(2) == [3, 1]
    pool.free([2])
    assert pool.allocate(3) == [3, 1, 2]


def test_copy_targets_takes_nothing_off_the_free_list() -> None:
    pool = BlockPool(4)
    assert pool.copy_targets(0) == []
    assert pool.copy_targets(3) == [1, 2, 3]
    assert pool.num_free == 3


def test_take_takes_the_named_blocks_or_none() -> None:
    pool = BlockPool(5)
    pool.allocate(1)
    for blocks in ([3, 1], [3, 3], [0], [5]):
        with pytest.raises(SpecError, match="take: blocks"):
            pool.take(blocks)
        assert pool.free_block_ids() == [2, 3, 4]
    pool.take([4, 2])
    assert pool.free_block_ids() == [3]
    assert pool.is_private(4)


class PoolMachine(RuleBasedStateMachine):
    """The pool against three plain collections."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(9)
        self.free = list(range(1, 9))
        self.holders: Counter[int] = Counter()
        self.fences: dict[int, int] = {}
        self.freed_in_pass: set[int] = set()
        self.hashed: set[int] = set()
        self.step = 0

    @rule(count=st.integers(0, 9))
    def allocate(self, count: int) -> None:
        if count > len(self.free):
            with pytest.raises(PoolExhausted):
                self.pool.allocate(count)
            return
        assert self.pool.allocate(count) == self.free[:count]
        self._hold(self.free[:count])

    @rule(blocks=st.lists(st.integers(0, 9), max_size=3))
    def take(self, blocks: list[int]) -> None:
        allowed = set(self.free) - self.freed_in_pass
        if set(blocks) <= allowed and len(set(blocks)) == len(blocks):
            self.pool.take(blocks)
            self._hold(blocks)
        else:
            with pytest.raises(SpecError, match="take"):
                self.pool.take(blocks)

    @rule(blocks=st.lists(st.integers(0, 9), max_size=3))
    def share(self, blocks: list[int]) -> None:
        if any(Counter(blocks)[block] > self.holders[block] for block in blocks):
            with pytest.raises(SpecError, match="share"):
                self.pool.share(blocks)
        else:
            self.pool.share(blocks)
            self.holders.update(blocks)

    @rule(blocks=st.lists(st.integers(0, 9), max_size=4), fenced=st.booleans())
    def let_go(self, blocks: list[int], fenced: bool) -> None:
        fence = self.step + 1 if fenced else None
        if any(Counter(blocks)[block] > self.holders[block] for block in blocks):
            with pytest.raises(SpecError, match="free"):
                self.pool.free(blocks, fence)
            return
        freed = self.pool.free(blocks, fence)
        gone = []
        for block in blocks:
            self.holders[block] -= 1
            if not self.holders[block]:
                gone.append(block)
                self.hashed.discard(block)
        if fenced:
            self.fences.update(dict.fromkeys(gone, self.step + 1))
        else:
            self.free += gone
            self.freed_in_pass.update(gone)
        assert freed == ([] if fenced else gone)

    @rule(block=st.integers(0, 9), hashes=st.booleans())
    def hash_block(self, block: int, hashes: bool) -> None:
        if not self.holders[block]:
            with pytest.raises(SpecError, match="set_hashed"):
                self.pool.set_hashed(block, hashes)
            return
        self.pool.set_hashed(block, hashes)
        (self.hashed.add if hashes else self.hashed.discard)(block)

    @rule(reaps=st.booleans())
    def next_pass(self, reaps: bool) -> None:
        self.step += 1
        self.pool.begin_pass()
        self.freed_in_pass.clear()
        if reaps:
            passed = [block for block, fence in self.fences.items() if fence <= self.step]
            assert self.pool.reap(self.step) == passed
            self.free += passed
            for block in passed:
                del self.fences[block]

    def _hold(self, blocks: list[int]) -> None:
        self.holders.update(blocks)
        self.free = [block for block in self.free if block not in blocks]

    @invariant()
    def agrees_with_the_collections(self) -> None:
        pool, held = self.pool, {block for block, count in self.holders.items() if count}
        assert pool.free_block_ids() == self.free
        assert pool.fenced_block_ids() == list(self.fences)
        assert [pool.ref_cnt(block) for block in range(10)] == [self.holders[block] for block in range(10)]
        assert pool.num_free + pool.num_held + pool.num_in_flight == 8
        assert sorted([*self.free, *held, *self.fences]) == list(range(1, 9))
        private = [block for block in range(10) if self.holders[block] == 1 and block not in self.hashed]
        assert [block for block in range(10) if pool.is_private(block)] == private
        some = [block for block in (7, 2, 5, 1) if block in held]
        assert pool.not_private(some) == [i for i, block in enumerate(some) if block not in private]
        targets = [block for block in self.free if block not in self.freed_in_pass]
        assert pool.copy_targets(len(targets)) == targets
        assert pool.copy_targets(len(targets) + 1) is None


TestPoolMachine = PoolMachine.TestCase
