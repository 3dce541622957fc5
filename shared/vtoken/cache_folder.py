"""Where vToken keeps what it makes once and can make again."""

import os
from pathlib import Path

__all__ = ["cache_folder"]


def cache_folder() -> Path:
    """``$XDG_CACHE_HOME/vtoken``, or ``~/.cache/vtoken``; it need not exist."""
    root = os.environ.get("XDG_CACHE_HOME")
    return (Path(root) if root else Path.home() / ".cache") / "vtoken"
