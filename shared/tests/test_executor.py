from typing import Any

import pytest

from vtoken.errors import SpecError
from vtoken.executor import KVSpec, Observation, RequestObservation

SMOLLM2 = {"num_layers": 30, "num_kv_heads": 3, "num_query_heads": 9, "head_size": 64, "dtype": "bfloat16"}


def make_spec(**changes: Any) -> KVSpec:
    return KVSpec(**{**SMOLLM2, "block_size": 16, "num_blocks": 9, **changes})


def test_kv_bytes_count_kv_heads_not_query_heads() -> None:
    spec = make_spec()
    assert spec.token_elements == 30 * 2 * 3 * 64
    assert spec.token_bytes == 23_040
    assert make_spec(num_query_heads=3).token_bytes == spec.token_bytes


def test_queries_count_query_heads() -> None:
    assert make_spec().query_elements == 30 * 9 * 64


@pytest.mark.parametrize(("dtype", "item_bytes"), [("float32", 4), ("bfloat16", 2), ("float16", 2)])
def test_every_dtype_has_its_width(dtype: str, item_bytes: int) -> None:
    spec = make_spec(dtype=dtype)
    assert (spec.item_bytes, spec.token_bytes) == (item_bytes, spec.token_elements * item_bytes)


def test_slots_count_the_null_block() -> None:
    assert make_spec().num_slots == 144


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_layers": 0}, "num_layers=0: give at least 1"),
        ({"num_kv_heads": 0}, "num_kv_heads=0: give at least 1"),
        ({"num_query_heads": 0}, "num_query_heads=0: give at least 1"),
        ({"head_size": -1}, "head_size=-1: give at least 1"),
        ({"max_num_reqs": 0}, "max_num_reqs=0: give at least 1"),
        ({"dtype": "float64"}, "dtype='float64': choose one of float32, bfloat16, float16"),
        ({"block_size": 0}, "block_size=0: give 1 to 128"),
        ({"block_size": 129}, "block_size=129: give 1 to 128"),
        ({"num_blocks": 1}, "num_blocks=1: give at least 2, since block 0 is the null block"),
        ({"num_query_heads": 10}, "num_query_heads=10 is no multiple of num_kv_heads=3"),
    ],
)
def test_an_impossible_pool_is_refused_by_name(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        make_spec(**changes)


@pytest.mark.parametrize("block_size", [1, 64, 65, 128])
def test_blocks_have_one_to_128_slots(block_size: int) -> None:
    assert make_spec(block_size=block_size).block_size == block_size


def test_a_shared_block_is_held_once() -> None:
    def request(*block_ids: int) -> RequestObservation:
        return RequestObservation(block_ids, (1,) * len(block_ids), (), (), "0" * 16)

    seen = Observation({"a": request(1, 2), "b": request(1, 5)}, frozenset({3, 4}), num_blocks=6)
    assert seen.held_block_ids == {1, 2, 5}
