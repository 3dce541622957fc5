from pathlib import Path

import pytest

pytest.importorskip("jax")

from vtoken.errors import SpecError
from vtoken_bench.jax_compaction import draw_compaction, record_allocations, record_compaction

PICTURE = Path(__file__).parents[2] / "docs/images/jax_compaction.svg"


@pytest.fixture(scope="module")
def allocations():
    return record_allocations()


def test_the_moves_fill_holes_free_blocks_and_leave_every_array_where_it_is():
    shown = record_compaction()
    assert sorted(shown.before.values()) == sorted(shown.after.values())
    assert [shown.after[move.dst_slot] for move in shown.moves] == [shown.before[move.src_slot] for move in shown.moves]
    assert len(shown.moves) >= 4
    assert len({slot // 8 for slot in shown.before}) - len({slot // 8 for slot in shown.after}) >= 2
    assert shown.num_in_place == shown.num_arrays == 5


def test_a_donated_move_allocates_for_its_tokens_and_another_for_the_pool(allocations):
    whole, many, few = allocations
    assert len(set(many.new_bytes)) == len(set(few.new_bytes)) == 1
    assert few.new_bytes[0] < many.new_bytes[0] < 3 * 256 * 1536  # bytes of a token
    assert all(new > pool for new, pool in zip(whole.new_bytes, whole.pool_bytes, strict=True))


def test_the_same_picture_is_drawn_each_time_the_docs_have_one_and_other_formats_are_refused(allocations):
    shown = record_compaction(), allocations
    picture = draw_compaction(*shown, "svg")
    assert draw_compaction(*shown, "svg") == picture
    assert b"</svg>" in PICTURE.read_bytes()
    with pytest.raises(SpecError, match="image format 'gif': choose one of png, svg"):
        draw_compaction(*shown, "gif")
