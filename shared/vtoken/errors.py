"""The three kinds of error that vToken raises."""

__all__ = ["InvariantError", "PoolExhausted", "SpecError"]


class SpecError(ValueError):
    """A caller's mistake. The message names the value and the remedy; nothing was changed."""


class PoolExhausted(SpecError):
    """Not enough free blocks for a call. Nothing was changed; reclaim, wait for fences, or preempt, then call again."""


class InvariantError(RuntimeError):
    """A bug of ours. The message begins with the invariant's number (``INV-2: ...``)."""
