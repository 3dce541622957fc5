"""What the scheduler knows of each request's mass: how far it is known, what was asked, what was answered."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from math import nan

from vtoken.errors import InvariantError
from vtoken.policies import Choice, MassNeed
from vtoken.types import Position
from vtoken_torch.vllm_plugin.mass.orders import Answer, Masses, Question

__all__ = ["MassBook", "RequestMass"]


@dataclass(frozen=True, slots=True)
class _Answered:
    question: Question
    num_known: int  # computed tokens whose mass it counts
    answer: Answer


class RequestMass:
    """One request's line from its (re)start on. The masses themselves lie with the workers.

    Attributes:
        need: how they keep them.
        is_told: the workers have been told of it.
        num_known: computed tokens whose results are back.
        num_chunks_under_way: steps of more than one token whose results are not.
        asked_for: the highest count at which an answer that was asked for is to be used.
        owes_choice: the policy is to be asked again, as after a chunk, once such a result is back.
        is_wanted: a choice found no answer that serves it, so that one is to be asked for.
    """

    def __init__(self, need: MassNeed) -> None:
        self.need = need
        self.is_told = False
        self.num_known = 0
        self.num_chunks_under_way = 0
        self.asked_for = 0
        self.owes_choice = False
        self.is_wanted = False
        self._num_asked = 0
        self._chosen: list[tuple[int, Collection[Position]]] = []  # with the number of questions before
        self._answered: _Answered | None = None

    def expect(self, num_queries: int) -> None:
        """A step that is scored is under way."""
        self.num_chunks_under_way += num_queries > 1

    def known(self, num_queries: int, num_computed: int) -> None:
        """Its result is back. ``num_computed``: the count with its tokens."""
        self.num_known = num_computed
        self.num_chunks_under_way -= num_queries > 1

    def asked(self, expected: int) -> int:
        """A question goes out, for use at that count. Returns its number."""
        self.asked_for, self.is_wanted = max(self.asked_for, expected), False
        self._num_asked += 1
        return self._num_asked

    def answered(self, number: int, question: Question, answer: Answer) -> None:
        """The answer to the question of that number, after ``known`` of its step."""
        self._answered = _Answered(question, self.num_known, answer)
        self._chosen = [(before, chosen) for before, chosen in self._chosen if before >= number]

    def forget(self, positions: Sequence[Position]) -> None:
        """These were chosen. Answers that are under way may still name them."""
        self._chosen.append((self._num_asked, frozenset(positions)))

    def victims(self, choice: Choice) -> Sequence[Position] | None:
        """The choice, ascending, out of the last answer; None if that does not hold it."""
        found = self._fresh()
        if found is None or isinstance(found.answer, Masses):
            return None
        asked = found.question.choice
        if asked is None or not _is_within(choice, asked):
            return None
        gone = frozenset[Position]().union(*(chosen for _, chosen in self._chosen))
        left = [each for each in found.answer if each not in gone and _may_die(each, choice)]
        if len(left) < choice.count and len(found.answer) >= asked.count:
            return None  # there are others behind the last that was named
        return sorted(left[: choice.count])

    def scores(self, live_positions: Sequence[Position]) -> tuple[list[float], list[list[float]]] | None:
        """``mass`` and ``mass_rows`` of a ``RequestView`` out of the last answer; None if there is none."""
        found = self._fresh()
        if found is None or not isinstance(found.answer, Masses):
            return None
        positions, mass, rows = found.answer
        index_of = {position: index for index, position in enumerate(positions)}
        places = [index_of.get(position, -1) for position in live_positions]
        return _taken(mass, places), [_taken(row, places) for row in rows]

    def _fresh(self) -> _Answered | None:
        """The last answer, if it counts all results that are back."""
        answered = self._answered
        return answered if answered is not None and answered.num_known == self.num_known else None


class MassBook:
    """The requests whose policies ask for mass, by ``trace_key``."""

    def __init__(self) -> None:
        self._requests: dict[int, RequestMass] = {}

    def __len__(self) -> int:
        return len(self._requests)

    def open(self, trace_key: int, need: MassNeed) -> None:
        """Collects for this request from its first token on."""
        self._requests[trace_key] = RequestMass(need)

    def __getitem__(self, trace_key: int) -> RequestMass:
        return self._requests[trace_key]

    def get(self, trace_key: int) -> RequestMass | None:
        """The request's mass, or None if nothing is collected for it."""
        return self._requests.get(trace_key)

    def scores(
        self, trace_key: int, positions: Sequence[Position]
    ) -> tuple[Sequence[float], Sequence[Sequence[float]]]:
        """``vtoken.victims.Scores``, of an answer that is there."""
        scores = self[trace_key].scores(positions)
        if scores is None:
            raise InvariantError(f"request {trace_key}: its policy was asked before an answer was there")
        return scores

    def lowest(self, trace_key: int, _: Sequence[Position] | None, choice: Choice) -> Sequence[Position]:
        """``vtoken.victims.Lowest``. Where no answer serves, nobody, and one is asked for."""
        mass = self[trace_key]
        victims = mass.victims(choice)
        mass.is_wanted = victims is None
        return victims or ()

    def restart(self, trace_key: int) -> None:
        """The request was preempted: it is rebuilt from its first token on, and results under way are not its own."""
        self.open(trace_key, self[trace_key].need)

    def close(self, trace_key: int) -> None:
        """Collects nothing for this request any more."""
        self._requests.pop(trace_key, None)


def _is_within(choice: Choice, asked: Choice) -> bool:
    """Whether whom ``choice`` may take ``asked`` ranked, and by the same score."""
    is_alike = (choice.score, choice.smooth) == (asked.score, asked.smooth)
    return is_alike and all(any(low <= a and b <= high for low, high in asked.spans) for a, b in choice.spans)


def _may_die(position: Position, choice: Choice) -> bool:
    return any(low <= position < high for low, high in choice.spans)


def _taken(values: Sequence[float], places: Sequence[int]) -> list[float]:
    return [nan if place < 0 else values[place] for place in places]
