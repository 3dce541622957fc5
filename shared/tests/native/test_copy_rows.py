"""The header by itself: any row width, any alignment, what lies beside the rows, and a bad slot."""

import ctypes
import random
from pathlib import Path

import pytest

from vtoken.native.loader import compiler, load

pytestmark = pytest.mark.skipif(compiler() is None, reason="no C++ compiler on this machine")

SOURCE = """
#include "copy_rows.h"
extern "C" int64_t copy(char* rows, int64_t row_bytes, int64_t num_slots, const int32_t* src, const int32_t* dst,
                        int64_t count) {
  const int64_t outside = vtoken::FirstOutside({src, dst, count}, num_slots);
  if (outside < 0) vtoken::CopyRows({rows, row_bytes}, {src, dst, count});
  return outside;
}
"""
MARGIN = 256


@pytest.fixture(scope="module")
def copy(tmp_path_factory):
    source = Path(tmp_path_factory.mktemp("native")) / "copy.cc"
    source.write_text(SOURCE)
    function = load(source).copy
    pointer, number = ctypes.c_void_p, ctypes.c_int64
    function.argtypes, function.restype = [pointer, number, number, pointer, pointer, number], number
    return function


def run(copy, row_bytes, num_slots, src, dst, shift=0, seed=0):
    """What the function says, the bytes before and after; rows begin ``shift`` bytes behind a cache line's begin."""
    size = 2 * MARGIN + row_bytes * num_slots
    memory = (ctypes.c_char * (size + 64))()
    start = -ctypes.addressof(memory) % 64 + shift
    before = random.Random(seed).randbytes(size)
    ctypes.memmove(ctypes.addressof(memory) + start, before, size)
    slots = [(ctypes.c_int32 * max(1, len(src)))(*column) for column in (src, dst)]
    said = copy(ctypes.addressof(memory) + start + MARGIN, row_bytes, num_slots, *slots, len(src))
    return said, before, bytes(memory)[start : start + size]


@pytest.mark.parametrize("shift", [0, 4, 16])
@pytest.mark.parametrize("row_bytes", [1, 4, 16, 60, 64, 100, 384, 768, 4096, 8192 + 64])
def test_rows_are_copied_and_nothing_else_is_touched(copy, row_bytes, shift):
    slots = random.Random(row_bytes).sample(range(40), 34)
    src, dst = slots[:17], slots[17:]

    said, before, after = run(copy, row_bytes, 40, src, dst, shift)

    expected = bytearray(before)
    for s, d in zip(src, dst, strict=True):
        from_, to = (MARGIN + slot * row_bytes for slot in (s, d))
        expected[to : to + row_bytes] = before[from_ : from_ + row_bytes]
    assert said == -1
    assert after == bytes(expected)


@pytest.mark.parametrize("count", [0, 1, 2, 3])
def test_the_first_and_the_last_moves_are_like_the_others(copy, count):
    said, before, after = run(copy, 64, 8, [7, 0, 6][:count], [1, 5, 2][:count])
    rows, were = ([data[MARGIN + 64 * slot :][:64] for slot in range(8)] for data in (after, before))
    come_from = dict(list({1: 7, 5: 0, 2: 6}.items())[:count])
    assert said == -1
    assert rows == [were[come_from.get(slot, slot)] for slot in range(8)]


@pytest.mark.parametrize(("src", "dst"), [([0, -1], [2, 3]), ([0, 1], [2, -1]), ([0, 8], [2, 3]), ([0, 1], [2, 8])])
def test_a_slot_outside_is_told_before_anything_is_copied(copy, src, dst):
    said, before, after = run(copy, 64, 8, src, dst)
    assert (said, after) == (1, before)
