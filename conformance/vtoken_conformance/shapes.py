"""The few shapes of random programs: both regimes, three dtypes, grouped, multi-query and multi-head attention."""

from vtoken.config import Regime
from vtoken.executor import DType, KVSpec

__all__ = ["CROWDS", "MAX_REQS", "SPECS"]

MAX_REQS = 4


def _spec(
    block_size: int, num_blocks: int, dtype: DType, regime: Regime, num_kv_heads: int = 2, max_num_reqs: int = MAX_REQS
) -> KVSpec:
    return KVSpec(
        num_layers=2,
        num_kv_heads=num_kv_heads,
        num_query_heads=4,
        head_size=8,
        dtype=dtype,
        block_size=block_size,
        num_blocks=num_blocks,
        max_num_reqs=max_num_reqs,
        regime=regime,
    )


SPECS = (
    _spec(4, 17, "float32", "ordered"),
    _spec(4, 17, "float32", "fenced"),
    _spec(16, 9, "bfloat16", "ordered", num_kv_heads=1),
    _spec(3, 25, "float16", "fenced", num_kv_heads=4),
    _spec(1, 41, "float32", "ordered", num_kv_heads=4),
    _spec(16, 9, "bfloat16", "fenced", num_kv_heads=1),
)

CROWDS = {
    16: _spec(16, 161, "float32", "ordered", max_num_reqs=64),
    32: _spec(32, 129, "bfloat16", "fenced", max_num_reqs=64),
}
"""By block size: pools of 64 requests."""
