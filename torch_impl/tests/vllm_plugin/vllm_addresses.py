"""Where the tensors lie that attention reads: a captured graph binds their addresses."""

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

NAMES = ("block_table_tensor", "seq_lens", "slot_mapping")


@contextmanager
def watched_addresses() -> Iterator[dict[str, set[int]]]:
    """Addresses that the builder of attention metadata was given so far, by tensor."""
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionMetadataBuilder

    seen: dict[str, set[int]] = defaultdict(set)
    kept: list[Any] = []  # no address is given out again
    build = CPUAttentionMetadataBuilder.build

    def watched(self: Any, common_prefix_len: int, common_attn_metadata: Any, *args: Any, **kwargs: Any) -> Any:
        for name in NAMES:
            kept.append(getattr(common_attn_metadata, name))
            seen[name].add(kept[-1].data_ptr())
        return build(self, common_prefix_len, common_attn_metadata, *args, **kwargs)

    with patch.object(CPUAttentionMetadataBuilder, "build", watched):
        yield seen
