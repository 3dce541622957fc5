"""What holds for every shipped policy, checked against slow definitions written from the design alone."""

import inspect
from collections.abc import Callable
from dataclasses import replace
from math import isnan, nan
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vtoken.config import VTokenConfig
from vtoken.fingerprint import fmix32
from vtoken.policies import Policy, RequestView, Signal
from vtoken.policies.h2o import H2OPolicy
from vtoken.policies.no_eviction import NoEvictionPolicy
from vtoken.policies.paged_eviction import PagedEvictionPolicy
from vtoken.policies.random import RandomPolicy
from vtoken.policies.scissorhands import ScissorhandsPolicy
from vtoken.policies.sliding_window import SlidingWindowPolicy
from vtoken.policies.snapkv import SnapKVPolicy
from vtoken.policies.streaming_llm import StreamingLLMPolicy
from vtoken.policies.tova import TOVAPolicy

SHIPPED: list[type[Policy]] = [
    H2OPolicy,
    NoEvictionPolicy,
    PagedEvictionPolicy,
    RandomPolicy,
    ScissorhandsPolicy,
    SlidingWindowPolicy,
    SnapKVPolicy,
    StreamingLLMPolicy,
    TOVAPolicy,
]
every_policy = pytest.mark.parametrize("policy", [kind() for kind in SHIPPED], ids=lambda policy: policy.name)


@st.composite
def views(draw: st.DrawFn) -> RequestView:
    computed = draw(st.integers(0, 60))
    live = sorted(draw(st.sets(st.integers(0, computed - 1)))) if computed else []
    if draw(st.booleans()):
        live = list(range(computed))
    masses = st.sampled_from([0.0, 0.25, 0.5, 1.0, 3.0])  # few and binary: many ties, exact sums
    unseen = draw(st.sets(st.sampled_from(live), max_size=5)) if live else set()
    mass = [nan if position in unseen else draw(masses) for position in live]
    queries = sorted(draw(st.lists(st.integers(0, computed), max_size=4)))
    rows = [[draw(masses) if position <= query else nan for position in live] for query in queries]
    bounds = st.integers(0, 70)
    ranges = st.lists(st.tuples(bounds, bounds).map(sorted).map(tuple), max_size=3).map(tuple)
    budget = draw(
        st.one_of(
            st.fixed_dictionaries({"kv_budget": st.integers(1, 60)}),
            st.fixed_dictionaries({"eviction_ratio": st.sampled_from([0.0, 0.1, 0.5, 0.9])}),
        )
    )
    config = VTokenConfig(
        policy="any",
        num_sinks=draw(st.integers(0, 6)),
        recent=draw(st.none() | st.integers(0, 12)),
        protected=draw(st.just("prompt") | ranges),
        seed=draw(st.integers(0, 2**40)),
        smooth=draw(st.sampled_from([None, 1, 3, 5, 17])),
        history=draw(st.none() | st.integers(1, 6)),
        page_size=draw(st.integers(1, 8)),
        **budget,
    )
    return RequestView(computed, draw(st.integers(0, 65)), live, config, mass, rows)


def default_recent(policy: Policy, view: RequestView) -> int:
    wanted = {
        "h2o": view.budget // 2,
        "scissorhands": view.budget // 10,
        "random": view.budget // 10,
        "tova": 1,
        "snapkv": min(view.config.history or 32, view.budget // 2),
        "paged_eviction": view.config.page_size,
    }.get(policy.name, 0)
    return max(0, min(wanted, view.budget - view.config.num_sinks))


def is_kept(policy: Policy, view: RequestView, position: int) -> bool:
    config = view.config
    recent = default_recent(policy, view) if config.recent is None else config.recent
    ranges = ((0, view.prompt_len),) if config.protected == "prompt" else config.protected
    return (
        (position < config.num_sinks and policy.name != "sliding_window")
        or position >= view.num_computed_tokens - recent
        or any(low <= position < high for low, high in ranges)
    )


def slow_scores(policy: Policy, view: RequestView) -> list[float]:
    match policy.name:
        case "h2o" | "tova" | "snapkv" | "paged_eviction":
            return list(view.mass)
        case "scissorhands":
            return [
                nan if isnan(mass) else float(sum(is_above_mean(row, i) for row in view.mass_rows))
                for i, mass in enumerate(view.mass)
            ]
        case "random":
            key = fmix32(view.num_computed_tokens ^ fmix32(view.config.seed % 2**32))
            return [float(fmix32(position ^ key)) for position in view.live_positions]
        case _:
            return [float(position) for position in view.live_positions]


def is_above_mean(row: list[float], i: int) -> bool:
    seen = [mass for mass in row if not isnan(mass)]
    return not isnan(row[i]) and row[i] > sum(seen) / len(seen)


def slow_smooth(policy: Policy, view: RequestView, scores: list[float]) -> list[float]:
    if Signal.ATTENTION_MASS not in policy.signals:
        return scores
    half = (view.config.smooth or {"snapkv": 7}.get(policy.name, 1)) // 2
    result = []
    for position, score in zip(view.live_positions, scores, strict=True):
        near = [
            s for p, s in zip(view.live_positions, scores, strict=True) if abs(p - position) <= half and not isnan(s)
        ]
        result.append(nan if isnan(score) else sum(near) / len(near))
    return result


def candidates(policy: Policy, view: RequestView) -> list[tuple[float, int]]:
    """(score, position) of every token that may go, worst first."""
    scores = slow_smooth(policy, view, slow_scores(policy, view))
    free = [
        (score, position)
        for score, position in zip(scores, view.live_positions, strict=True)
        if not isnan(score) and not is_kept(policy, view, position)
    ]
    if policy.name == "none" or (policy.name == "snapkv" and view.num_computed_tokens < view.prompt_len):
        return []
    return sorted(free)


def slow_pages(policy: Policy, view: RequestView) -> list[list[int]]:
    """Pages that may go, worst first."""
    size = view.config.page_size
    score_of = {position: score for score, position in candidates(policy, view)}
    pages = [list(range(first, first + size)) for first in range(0, view.num_computed_tokens, size)]
    whole = [page for page in pages if all(position in score_of for position in page)]
    return sorted(whole, key=lambda page: (sum(score_of[position] for position in page) / size, page))


@every_policy
@given(view=views())
def test_victims_are_live_ascending_never_kept_ones_and_meet_the_budget(policy: Policy, view: RequestView) -> None:
    free = {position for _, position in candidates(policy, view)}
    if policy.name == "paged_eviction":
        free = {position for page in slow_pages(policy, view) for position in page}
    victims = list(policy.select_victims(view))
    assert victims == sorted(set(victims))
    assert set(victims) <= free
    assert len(view.live_positions) - len(victims) <= view.budget or set(victims) == free


@every_policy
@given(view=views())
def test_victims_are_the_lowest_scores_and_ties_go_to_the_lower_position(policy: Policy, view: RequestView) -> None:
    excess = max(0, len(view.live_positions) - view.budget)
    if policy.name == "paged_eviction":
        pages = slow_pages(policy, view)[: -(-excess // view.config.page_size)]
        expected = [position for page in pages for position in page]
    else:
        expected = [position for _, position in candidates(policy, view)[:excess]]
    assert list(policy.select_victims(view)) == sorted(expected)


@every_policy
@given(view=views())
def test_the_same_view_gives_the_same_victims_and_is_left_as_it_was(policy: Policy, view: RequestView) -> None:
    before = repr(view)
    victims = list(policy.select_victims(view))
    assert repr(view) == before
    assert list(type(policy)().select_victims(replace(view, live_positions=tuple(view.live_positions)))) == victims


@pytest.mark.parametrize("kind", SHIPPED, ids=lambda kind: kind.__name__)
def test_a_shipped_policy_takes_under_50_lines_in_one_file(kind: type[Policy]) -> None:
    source = inspect.getsourcefile(kind)
    assert source is not None
    assert len(Path(source).read_text().splitlines()) < 50


@pytest.mark.parametrize("kind", SHIPPED, ids=lambda kind: kind.__name__)
def test_a_shipped_policy_cites_its_paper_or_says_that_there_is_none(kind: type[Policy]) -> None:
    text = kind.__doc__ or ""
    assert "arXiv" in text or "o paper" in text


def test_the_first_four_tokens_stay_by_default(make_view: Callable[..., RequestView]) -> None:
    view = make_view(20, kv_budget=8, num_sinks=VTokenConfig(policy="none").num_sinks, mass=[0.0] * 20)
    for policy in (H2OPolicy(), RandomPolicy(), StreamingLLMPolicy(), TOVAPolicy()):
        victims = policy.select_victims(view)
        assert len(victims) == 12
        assert min(victims) >= 4, policy.name


def test_a_protected_system_prompt_survives_every_policy(make_view: Callable[..., RequestView]) -> None:
    view = make_view(
        40, kv_budget=16, protected=((2, 12),), prompt_len=30, page_size=4, mass=[0.0] * 40, rows=[[0.0] * 40]
    )
    for kind in SHIPPED:
        assert not set(range(2, 12)) & set(kind().select_victims(view)), kind.__name__


def test_policies_without_scores_exist_and_work_where_no_mass_can_be_had(make_view: Callable[..., RequestView]) -> None:
    view = make_view(40, kv_budget=16)
    score_free = [kind() for kind in SHIPPED if not kind.signals]
    assert {policy.name for policy in score_free} == {"none", "random", "sliding_window", "streaming_llm"}
    for policy in score_free:
        assert len(policy.select_victims(view)) == (0 if policy.name == "none" else 24)


def test_a_default_recent_window_gives_way_so_that_a_tiny_budget_is_met(make_view: Callable[..., RequestView]) -> None:
    view = make_view(20, kv_budget=5, num_sinks=4, mass=[1.0] * 20)
    assert list(H2OPolicy().select_victims(view)) == list(range(4, 19))
