import json
from array import array
from collections import Counter, OrderedDict, deque
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vtoken.errors import SpecError
from vtoken_jax.plain_data import decode, encode


@dataclass(frozen=True, slots=True)
class Point:
    x: int
    y: object


class Loose:
    def __init__(self, **attributes):
        vars(self).update(attributes)


leaves = st.none() | st.booleans() | st.integers() | st.text() | st.binary() | st.floats(allow_nan=False)
keys = st.integers() | st.text() | st.tuples(st.integers(), st.integers())
values = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner)
        | st.lists(inner).map(tuple)
        | st.lists(inner).map(deque)
        | st.dictionaries(keys, inner)
        | st.dictionaries(keys, inner).map(OrderedDict)
        | st.builds(Point, st.integers(), inner)
    ),
    max_leaves=12,
)


@given(values)
def test_what_is_encoded_as_json_comes_back_the_same(value):
    back = decode(json.loads(json.dumps(encode(value, (Point,)))), (Point,))
    assert back == value
    assert type(back) is type(value)


def test_arrays_counters_sets_and_plain_objects_come_back_too():
    value = Loose(words=array("Q", [1 << 63, 2]), state=bytearray(b"\0\1"), free={3, 4}, counts=Counter("aab"))
    back = decode(json.loads(json.dumps(encode(value, (Loose,)))), (Loose,))
    assert vars(back) == vars(value)
    assert type(back.state) is bytearray


def test_a_class_that_is_not_listed_is_neither_written_nor_made():
    with pytest.raises(TypeError, match="Loose is not listed"):
        encode([Loose()], (Point,))
    with pytest.raises(SpecError, match="another version"):
        decode(["Loose()", {}], (Point,))


def test_a_class_with_other_fields_is_refused():
    with pytest.raises(SpecError, match="host state has another Point"):
        decode(["Point()", {"x": 1}], (Point,))
