"""When a victim dies: a function of its request's computed count alone (SPEC K-1, K-2)."""

from collections.abc import Sequence

from vtoken.types import Position

__all__ = ["death_counts"]


def death_counts(victims: Sequence[Position], at_computed: int, interval: int, at_once: bool = False) -> list[int]:
    """The computed count at which each victim dies: it is invisible in the step that writes that position.

    ``at_once`` says that the batch follows a prefill chunk or was chosen under pressure.
    """
    if at_once or len(victims) > interval:
        return [at_computed] * len(victims)
    return list(range(at_computed, at_computed + len(victims)))
