"""What the policies read: each request's attention mass by position."""

from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any

from vtoken.policies import MassNeed, MassRecorder
from vtoken.types import Position

__all__ = ["MassBook", "RequestMass"]


class RequestMass:
    """One request's mass from its (re)start on.

    Rows of a window wait until a policy asks, since the later ones make most of them worthless; a running sum takes
    each step at once.

    Attributes:
        num_known: computed tokens whose results are back.
        num_chunks_under_way: steps of more than one token whose results are not.
        owes_choice: the policy is to be asked again, as after a chunk, once such a result is back.
    """

    def __init__(self, need: MassNeed) -> None:
        self.need = need
        self.num_known = 0
        self.num_chunks_under_way = 0
        self.owes_choice = False
        self._recorder = MassRecorder(need)
        self._waiting: deque[tuple[Sequence[Position], Any]] = deque(maxlen=need.window)
        self._gone: list[Position] = []

    def expect(self, num_queries: int) -> None:
        """A step is under way."""
        self.num_chunks_under_way += num_queries > 1

    def take(self, positions: Sequence[Position], masses: Any, num_queries: int, num_computed: int) -> None:
        """Takes one step that was expected.

        Args:
            positions: live positions in packed order when the step ran; those of a chunk come last, ascending.
            masses: float32 ``[1, len(positions)]``, the summed rows of the step's ``num_queries`` queries; with a
                window, ``[min(num_queries, window), len(positions)]``, the rows of the last of them.
            num_queries: tokens that the step computed.
            num_computed: the count with them.
        """
        self.num_known = num_computed
        self.num_chunks_under_way -= num_queries > 1
        if not self.need.window:
            self._recorder.observe_sum(positions, masses[0].tolist(), num_queries)
            return
        for num_later, row in zip(range(len(masses) - 1, -1, -1), masses, strict=True):
            num_seen = len(positions) - num_later
            self._waiting.append((positions[:num_seen], row[:num_seen]))

    def forget(self, positions: Iterable[Position]) -> None:
        """These were chosen, and are no candidates any more. Rows that are under way may still name them."""
        self._gone.extend(positions)

    def scores(self, live_positions: Sequence[Position]) -> tuple[list[float], list[list[float]]]:
        """``mass`` and ``mass_rows`` of a ``RequestView``."""
        while self._waiting:
            positions, row = self._waiting.popleft()
            self._recorder.observe(positions, row.tolist())
        self._recorder.forget(self._gone)
        self._gone.clear()
        return self._recorder.scores(live_positions)


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
        """``vtoken.victims.Scores``."""
        return self[trace_key].scores(positions)

    def restart(self, trace_key: int) -> None:
        """The request was preempted: it is rebuilt from its first token on, and results under way are not its own."""
        self.open(trace_key, self[trace_key].need)

    def close(self, trace_key: int) -> None:
        """Collects nothing for this request any more."""
        self._requests.pop(trace_key, None)
