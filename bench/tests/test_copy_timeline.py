import re
from pathlib import Path

import pytest

from vtoken.errors import SpecError
from vtoken_bench.copy_timeline import copy_timeline, record_timeline

PICTURE = Path(__file__).parents[2] / "docs/images/copy_timeline.svg"


def test_copies_run_behind_the_forward_beside_sampling_and_before_the_next_write():
    spans, waits, fences = record_timeline()
    moves = [span for span in spans if span.what.startswith("move")]
    assert len(moves) >= 2
    for move in moves:
        attention = max(span.end for span in spans if span.what == "attention" and span.start < move.start)
        append = min(span.start for span in spans if span.what == "append" and span.start >= attention)
        assert attention < move.start < move.end <= append
        assert any(span.what == "sample" and span.start < move.end and move.start < span.end for span in spans)
        assert any(wait.stream == "compute" and wait.event_time == move.end for wait in waits)
        assert any(fence.start < move.start and fence.end >= move.end for fence in fences)


def test_the_same_picture_is_drawn_each_time_and_it_is_the_one_in_the_docs():
    picture = copy_timeline("svg")
    assert copy_timeline("svg") == picture
    assert b"</svg>" in picture
    if drawn_by(picture) == drawn_by(PICTURE.read_bytes()):  # each release places text a little differently
        assert picture == PICTURE.read_bytes()


def drawn_by(picture):
    (release,) = re.findall(rb"Matplotlib v[\d.]+", picture)[:1]
    return release


def test_other_formats_are_refused():
    with pytest.raises(SpecError, match="image format 'gif': choose one of png, svg"):
        copy_timeline("gif")
