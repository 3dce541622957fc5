"""What the two sides say to each other about attention mass: orders with a step's record, answers with its result."""

from array import array
from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

from vtoken.policies import Choice, MassNeed
from vtoken.types import Position

__all__ = ["MASS_ATTRIBUTE", "Answer", "MassOrder", "Masses", "Question"]

MASS_ATTRIBUTE = "vtoken_mass"
"""Name under which the answers hang on vLLM's ``ModelRunnerOutput``: ``Answer`` s by req_id."""


class Question(NamedTuple):
    """Asked with a step, answered with its result, so that the step's own queries count.

    Attributes:
        choice: who is to go; None: the masses themselves, for a policy that is no ranking.
        doomed: positions of live tokens that are no candidates.
    """

    choice: Choice | None
    doomed: Sequence[Position]


class MassOrder(NamedTuple):
    """Of one request whose policy looks at attention, in one step.

    Attributes:
        start: computed tokens before the step.
        num_tokens: that the step computes.
        place: packed index of the first of them; the others follow it. In lazy mode holes have indices too.
        is_scored: the mass of these tokens' queries is collected.
        need: where the request begins, or begins anew: how its mass is kept.
        positions: where a plan changed the layout: the position at each packed index, this step's tokens included,
            -1 in a hole.
        question: what the worker is asked.
    """

    start: Position
    num_tokens: int
    place: int
    is_scored: bool
    need: MassNeed | None = None
    positions: "array[int] | None" = None
    question: Question | None = None


class Masses(NamedTuple):
    """``mass`` and ``mass_rows`` of a ``RequestView`` with these positions, ascending."""

    positions: "array[int]"
    mass: "array[float]"
    rows: Sequence["array[float]"]


Answer: TypeAlias = "array[int] | Masses"
"""Victims, lowest score first, or the masses."""
