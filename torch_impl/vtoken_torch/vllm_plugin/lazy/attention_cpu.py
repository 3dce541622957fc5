"""vLLM's CPU attention with dead slots left out: its kernel serves the rows without any, plain torch the others.

Put in place like the mass's (``mass/attention_cpu.py``), and before it: the mass reads the whole step's metadata.
"""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl

from vtoken.errors import InvariantError
from vtoken_torch.vllm_plugin.mass.queries import Heads

if TYPE_CHECKING:
    from vtoken_torch.vllm_plugin.lazy.holes import HoleKeeper

__all__ = ["LiveAttentionImpl", "skip_dead"]


class LiveAttentionImpl(CPUAttentionBackendImpl):
    """Computes what its base computes where nothing is dead. ``keeper``: knows what is."""

    keeper: "HoleKeeper"

    def forward(
        self,
        layer: Any,
        query: Any,
        key: Any,
        value: Any,
        kv_cache: Any,
        attn_metadata: Any,
        output: Any,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """The step's keys are in the cache already."""
        step = None if attn_metadata is None else self.keeper.step(layer, query, kv_cache, attn_metadata)
        if step is None:
            return super().forward(layer, query, key, value, kv_cache, attn_metadata, output, *args, **kwargs)
        if step.others is not None:
            super().forward(layer, query, key, value, kv_cache, step.others, output, *args, **kwargs)
        heads = Heads(self.scale, self.logits_soft_cap, self.sinks)
        for rows in step.rows:
            rows.attend(query, kv_cache, heads, output)
        return output


def skip_dead(layers: Iterable[Any], keeper: "HoleKeeper") -> None:
    """From now on these attention layers leave out what ``keeper`` knows to be dead."""
    for layer in layers:
        owner = type(layer.impl)
        if not issubclass(owner, CPUAttentionBackendImpl):
            raise InvariantError(f"lazy mode: no implementation skips dead slots in {owner.__name__}")
        layer.impl.__class__ = type(f"VTokenLive{owner.__name__}", (LiveAttentionImpl, owner), {})
        layer.impl.keeper = keeper
