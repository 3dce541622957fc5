from collections.abc import Callable, Sequence
from typing import Any

import pytest

from vtoken.config import VTokenConfig
from vtoken.errors import SpecError
from vtoken.policies import Policy, RequestView
from vtoken.policies.no_eviction import NoEvictionPolicy
from vtoken.request_table import RequestTable
from vtoken.trace import TraceEvent, VictimTrace
from vtoken.types import Position
from vtoken.victims import Occasion, PolicyVictims, TraceVictims

CONFIG = VTokenConfig(policy="oldest", kv_budget=4, interval=4, when="always")
IN_DECODE = Occasion(trace_key=0, prompt_len=8)
AFTER_CHUNK = Occasion(trace_key=0, prompt_len=8, after_chunk=True)
UNDER_PRESSURE = Occasion(trace_key=0, prompt_len=8, under_pressure=True)


class Oldest(Policy):
    """The oldest tokens beyond the budget, as many as it says; remembers what it was shown."""

    name = "oldest"

    def __init__(self) -> None:
        self.views: list[RequestView] = []

    def select_victims(self, view: RequestView) -> Sequence[Position]:
        self.views.append(view)
        return view.live_positions[: max(0, len(view.live_positions) - view.budget)]


def make_source(when: str = "always", **options: Any) -> PolicyVictims:
    return PolicyVictims(CONFIG.with_changes(when=when), Oldest(), **options)


@pytest.fixture
def table() -> RequestTable:
    """Eight computed tokens, all live."""
    return grow(RequestTable("a", 4), 8)


def grow(table: RequestTable, total_len: int) -> RequestTable:
    table.sync_new_tokens(list(range(1, 20)), total_len)
    return table


# -- a policy that chooses -------------------------------------------------------------------------------------------


def test_a_policy_is_asked_once_an_interval(table: RequestTable) -> None:
    source = make_source()
    asked = []
    for total_len in range(8, 18):
        if event := source.choose(grow(table, total_len), IN_DECODE):
            table.evict_tokens(event.chosen)
            asked.append(total_len)
    assert asked == [8, 12, 16]


def test_a_policy_is_asked_after_every_chunk(table: RequestTable) -> None:
    source = make_source()
    assert source.choose(table, AFTER_CHUNK) is not None
    assert source.choose(grow(table, 9), IN_DECODE) is None
    assert source.choose(grow(table, 10), AFTER_CHUNK) is not None


def test_the_interval_counts_from_the_last_time_that_the_policy_was_asked(table: RequestTable) -> None:
    source = make_source()
    source.choose(grow(table, 10), AFTER_CHUNK)
    assert [n for n in range(11, 16) if source.choose(grow(table, n), IN_DECODE)] == [14]


def test_a_batch_in_decode_dies_one_a_token(table: RequestTable) -> None:
    event = make_source().choose(table, IN_DECODE)
    assert event == TraceEvent(0, 8, (0, 1, 2, 3), (8, 9, 10, 11))


@pytest.mark.parametrize("occasion", [AFTER_CHUNK, UNDER_PRESSURE])
def test_a_batch_after_a_chunk_or_under_pressure_dies_at_once(table: RequestTable, occasion: Occasion) -> None:
    assert make_source().choose(table, occasion) == TraceEvent(0, 8, (0, 1, 2, 3), (8, 8, 8, 8))


def test_a_batch_larger_than_the_interval_dies_at_once(table: RequestTable) -> None:
    assert make_source().choose(grow(table, 9), IN_DECODE) == TraceEvent(0, 9, (0, 1, 2, 3, 4), (9, 9, 9, 9, 9))


def test_victims_die_in_ascending_order_whatever_the_policy_gave(table: RequestTable) -> None:
    class Reversed(Oldest):
        def select_victims(self, view: RequestView) -> Sequence[Position]:
            return list(reversed(super().select_victims(view)))

    event = PolicyVictims(CONFIG, Reversed()).choose(table, IN_DECODE)
    assert event is not None
    assert dict(zip(event.chosen, event.died, strict=True)) == {0: 8, 1: 9, 2: 10, 3: 11}


def test_with_ample_memory_a_policy_is_not_asked_at_all(table: RequestTable) -> None:
    source = make_source("pressure")
    assert source.choose(table, IN_DECODE) is None
    assert source.choose(table, AFTER_CHUNK) is None
    assert source.policy.views == []
    assert source.choose(table, UNDER_PRESSURE) is not None


def test_a_request_longer_than_the_pool_evicts_whatever_when_says(table: RequestTable) -> None:
    source = make_source("pressure")
    assert source.choose(table, Occasion(0, 8, after_chunk=True, must_evict=True)) is not None


def test_a_policy_sees_candidates_alone(table: RequestTable) -> None:
    source = make_source()
    table.evict_token(2)
    table.doom([0, 5])
    source.choose(table, AFTER_CHUNK)
    (view,) = source.policy.views
    assert list(view.live_positions) == [1, 3, 4, 6, 7]
    assert (view.num_computed_tokens, view.prompt_len, view.budget) == (8, 8, 4)


def test_scores_are_asked_for_the_candidates_of_the_request(table: RequestTable) -> None:
    def scores(trace_key: int, positions: Sequence[Position]) -> tuple[list[float], list[list[float]]]:
        assert trace_key == 0
        mass = [float(position) for position in positions]
        return mass, [mass]

    table.evict_token(2)
    source = make_source(scores=scores)
    source.choose(table, AFTER_CHUNK)
    (view,) = source.policy.views
    assert list(view.mass) == [0.0, 1.0, 3.0, 4.0, 5.0, 6.0, 7.0]
    assert list(view.mass_rows) == [view.mass]


def test_under_pressure_doomed_tokens_die_with_the_new_victims(table: RequestTable) -> None:
    table.doom([1, 0])
    event = make_source().choose(table, UNDER_PRESSURE)
    assert event == TraceEvent(0, 8, (1, 0, 2, 3), (8, 8, 8, 8))
    assert table.num_doomed_tokens == 2  # choosing changes no table


def test_under_pressure_doomed_tokens_die_though_the_policy_gives_nobody(table: RequestTable) -> None:
    table.evict_tokens([0, 1, 2])
    table.doom([3])
    assert make_source().choose(table, UNDER_PRESSURE) == TraceEvent(0, 8, (3,), (8,))


def test_every_event_is_recorded_once(table: RequestTable) -> None:
    recorded: list[TraceEvent] = []
    source = make_source(on_event=recorded.append)
    events = [source.choose(grow(table, n), IN_DECODE) for n in (8, 9, 12)]
    assert recorded == [events[0], events[2]]


def test_requests_have_intervals_of_their_own(table: RequestTable) -> None:
    source = make_source()
    assert source.choose(table, IN_DECODE) is not None
    assert source.choose(table, Occasion(trace_key=1, prompt_len=8)) is not None


# -- preemption ------------------------------------------------------------------------------------------------------


def test_a_request_rebuilt_after_preemption_repeats_its_own_deaths_and_records_none_twice(table: RequestTable) -> None:
    recorded: list[TraceEvent] = []
    source = make_source(on_event=recorded.append)
    table.evict_tokens(source.choose(table, AFTER_CHUNK).chosen)  # type: ignore[union-attr]
    assert source.choose(grow(table, 12), IN_DECODE) == TraceEvent(0, 12, (4, 5, 6, 7), (12, 13, 14, 15))
    num_asked = len(source.policy.views)

    source.restart(0, 13)
    rebuilt = grow(RequestTable("a", 4), 6)
    assert source.choose(rebuilt, AFTER_CHUNK) is None
    assert source.choose(grow(rebuilt, 14), AFTER_CHUNK) == TraceEvent(
        0, 14, (0, 1, 2, 3, 4, 5, 6, 7), (14, 14, 14, 14, 14, 14, 14, 15)
    )
    assert len(recorded) == 2
    assert len(source.policy.views) == num_asked
    assert source.choose(grow(rebuilt, 16), IN_DECODE) is not None  # an interval after 12, the policy goes on
    assert len(recorded) == 3


def test_a_request_preempted_before_its_first_event_asks_the_policy_as_before(table: RequestTable) -> None:
    source = make_source()
    source.restart(0, 0)
    assert source.choose(table, AFTER_CHUNK) is not None


def test_a_request_may_be_preempted_while_it_is_rebuilt(table: RequestTable) -> None:
    source = make_source()
    first = source.choose(table, AFTER_CHUNK)
    source.restart(0, 8)
    source.restart(0, 0)
    assert source.choose(grow(RequestTable("a", 4), 8), AFTER_CHUNK) == first


def test_nothing_is_kept_of_a_finished_request(table: RequestTable) -> None:
    source = make_source()
    assert source.choose(table, AFTER_CHUNK) is not None
    source.finish(0)
    source.restart(0, 0)
    assert source.choose(grow(RequestTable("a", 4), 8), IN_DECODE) is not None


# -- a trace that is replayed ----------------------------------------------------------------------------------------


@pytest.fixture
def trace() -> VictimTrace:
    trace = VictimTrace()
    trace.add(TraceEvent(0, 8, (0, 1), (8, 8)))
    trace.add(TraceEvent(0, 12, (2, 3, 4), (12, 13, 14)))
    trace.add(TraceEvent(0, 13, (4, 5), (13, 13)))
    trace.add(TraceEvent(1, 9, (6,), (9,)))
    return trace


def test_a_replay_gives_the_same_events_at_the_same_counts(table: RequestTable, trace: VictimTrace) -> None:
    source = TraceVictims(trace)
    events = [source.choose(grow(table, n), IN_DECODE) for n in range(8, 15)]
    assert [event for event in events if event] == trace.events[0]


def test_no_event_comes_in_decode_below_the_count_that_a_source_names(table: RequestTable, trace: VictimTrace) -> None:
    replay, policy = TraceVictims(trace), make_source()
    assert (replay.next_count(0), replay.next_count(7), policy.next_count(0)) == (8, None, 4)
    for count in range(8, 15):
        due = [source.next_count(0) for source in (replay, policy)]
        for source, next_count in zip((replay, policy), due, strict=True):
            event = source.choose(grow(table, count), IN_DECODE)
            assert event is None or (next_count is not None and next_count <= count)
    assert (replay.next_count(0), policy.next_count(0)) == (None, 16)
    policy.restart(0, 14)
    assert policy.next_count(0) == 0  # it repeats its past: every step may bring some of it


def test_a_source_that_never_chooses_by_itself_says_so() -> None:
    assert make_source(when="pressure").next_count(0) is None
    assert make_source(when="pressure").next_count(0, must_evict=True) == 4
    assert PolicyVictims(VTokenConfig(policy="none", when="always"), NoEvictionPolicy()).next_count(0) is None


def test_a_replay_does_not_ask_why(table: RequestTable, trace: VictimTrace) -> None:
    source = TraceVictims(trace)
    table.doom([7])
    assert source.choose(table, UNDER_PRESSURE) == trace.events[0][0]
    assert source.choose(table, UNDER_PRESSURE) is None


def test_a_replay_behind_catches_up_and_the_earlier_death_counts(table: RequestTable, trace: VictimTrace) -> None:
    source = TraceVictims(trace)
    assert source.choose(grow(table, 12), AFTER_CHUNK) == TraceEvent(0, 12, (0, 1, 2, 3, 4), (12, 12, 12, 13, 14))
    source.restart(0, 12)
    assert source.choose(grow(table, 13), AFTER_CHUNK) == TraceEvent(0, 13, (0, 1, 2, 3, 4, 5), (13,) * 6)


def test_a_request_without_events_loses_nobody(table: RequestTable, trace: VictimTrace) -> None:
    source = TraceVictims(trace)
    assert source.choose(table, Occasion(trace_key=7, prompt_len=8, after_chunk=True)) is None


@pytest.mark.parametrize("forget", [lambda source, key: source.restart(key, 8), TraceVictims.finish])
def test_a_trace_is_replayed_from_its_start_after_preemption_or_the_end(
    table: RequestTable, trace: VictimTrace, forget: Callable[[TraceVictims, int], None]
) -> None:
    source = TraceVictims(trace)
    first = source.choose(table, IN_DECODE)
    forget(source, 0)
    assert source.choose(table, IN_DECODE) == first == trace.events[0][0]


# -- a policy of the user's own may be wrong -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ([2, 2], "chose position 2 twice: name each victim once"),
        ([99], "chose position 99: choose among view.live_positions"),
        ([-1], "chose position -1: choose among view.live_positions"),
        ([3], "chose position 3: choose among view.live_positions"),  # dead already
        ([2.0], "chose 2.0: return positions as plain integers"),
        ([True], "chose True: return positions as plain integers"),
        (None, "returned NoneType: return a list of positions"),
        ([0, 1, 2, 4, 5, 6, 7], "chose every live token: keep at least one"),
    ],
)
def test_a_wrong_choice_names_the_policy_and_the_position(table: RequestTable, answer: Any, message: str) -> None:
    class Wrong(Policy):
        name = "wrong"

        def select_victims(self, view: RequestView) -> Sequence[Position]:
            return answer

    table.evict_token(3)
    source = PolicyVictims(CONFIG.with_changes(policy="wrong"), Wrong())
    with pytest.raises(SpecError, match=f"policy 'wrong' at 8 computed tokens {message}"):
        source.choose(table, IN_DECODE)
