"""Whether a shape's pools fit the machine's memory, and what is left out where they do not."""

from vtoken_bench.executors.decode import DecodeShape

__all__ = ["NoRoom", "decode_shape"]

_SLACK_BYTES = 2_000_000_000  # compiled steps, prompts, memory to copy, and others live here too
_SHARE_OF_STEPS = 0.5
"""Of a cache: what steps take beside it, some layers' keys and values, gathered or repeated for the query heads."""


class NoRoom(Exception):
    """A shape does not fit; the message says what is needed and what there is."""


def decode_shape(batch: int, live: int, token_bytes: int, available: int | None) -> DecodeShape:
    """The shape, without transformers where only two pools fit. ``available`` bytes; None is not known.

    Raises:
        NoRoom: two pools do not fit.
    """
    pool = batch * live * token_bytes
    needed = {count: int((count + _SHARE_OF_STEPS) * pool) + _SLACK_BYTES for count in (2, 3)}
    if available is None or needed[3] <= available:
        return DecodeShape(batch, live)
    if needed[2] <= available:
        return DecodeShape(batch, live, with_hf=False)
    raise NoRoom(f"two pools need {needed[2] / 1e9:.1f} GB of memory, {available / 1e9:.1f} GB are available")
