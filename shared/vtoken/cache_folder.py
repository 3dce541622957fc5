"""Where vToken keeps what it makes once and can make again."""

import os
from pathlib import Path

from vtoken.errors import SpecError

__all__ = ["cache_folder"]


def cache_folder() -> Path:
    """``$XDG_CACHE_HOME/vtoken``, or ``~/.cache/vtoken``; it need not exist.

    Raises:
        SpecError: neither is known, as in a container whose user has no home.
    """
    root = os.environ.get("XDG_CACHE_HOME")
    if root:
        return Path(root) / "vtoken"
    try:
        return Path.home() / ".cache" / "vtoken"
    except RuntimeError:
        raise SpecError("no folder for the cache: this user has no home: set XDG_CACHE_HOME or HOME") from None
