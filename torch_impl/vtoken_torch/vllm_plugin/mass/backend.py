"""``--attention-backend CUSTOM`` on a GPU: vLLM's Triton attention, whose layers tell of themselves from the start."""

from typing import Any

from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
from vllm.v1.attention.backends.triton_attn import TritonAttentionBackend, TritonAttentionImpl

from vtoken_torch.vllm_plugin.mass.attention_device import watched

__all__ = ["VTokenAttentionBackend", "VTokenTritonAttentionImpl", "register_custom"]

VTokenTritonAttentionImpl: Any = watched(TritonAttentionImpl)
"""vLLM's, until a collector watches it: then rows that ask for mass are served by the kernels that give it."""


class VTokenAttentionBackend(TritonAttentionBackend):
    """All that the Triton backend supports, under the name that vLLM keeps for backends from outside."""

    @staticmethod
    def get_name() -> str:
        """As in vLLM's registry."""
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> Any:
        """The implementation of a layer."""
        return VTokenTritonAttentionImpl


def register_custom() -> None:
    """Makes it the process's ``CUSTOM``. vLLM looks it up by its path, when a model's layers are made."""
    path = f"{VTokenAttentionBackend.__module__}.{VTokenAttentionBackend.__qualname__}"
    register_backend(AttentionBackendEnum.CUSTOM, path)
