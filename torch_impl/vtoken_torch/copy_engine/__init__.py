"""Copies of whole tokens in and out of a KV cache, as bytes in every dtype."""

from vtoken_torch.copy_engine.cuda import CopyTicket, CUDACopyEngine
from vtoken_torch.copy_engine.engine import CopyEngine, make_copy_engine
from vtoken_torch.copy_engine.host import HostCopyEngine
from vtoken_torch.copy_engine.indexed import IndexCopyEngine, StreamedCopyEngine

__all__ = [
    "CUDACopyEngine",
    "CopyEngine",
    "CopyTicket",
    "HostCopyEngine",
    "IndexCopyEngine",
    "StreamedCopyEngine",
    "make_copy_engine",
]
