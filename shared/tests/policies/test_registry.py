"""Policies by name, and how a new one comes in from outside."""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from vtoken.errors import SpecError
from vtoken.policies import RequestView, get_policy
from vtoken.policies.h2o import H2OPolicy
from vtoken.policies.no_eviction import NoEvictionPolicy

OWN_POLICY = '''
"""Attention by age: a token's cumulated mass divided by the queries that could see it."""

from vtoken.policies import Policy, RequestView, Signal, lowest, smoothed


class MeanMassPolicy(Policy):
    """H2O (arXiv 2306.14048) without the head start of old tokens."""

    name = "mean_mass"
    signals = frozenset({Signal.ATTENTION_MASS})

    def select_victims(self, view: RequestView) -> list[int]:
        """The tokens with the least mass for each query since they came."""
        ages = [view.num_computed_tokens - position for position in view.live_positions]
        scores = [mass / age for mass, age in zip(view.mass, ages, strict=True)]
        return lowest(view, smoothed(view, scores), recent=view.budget // 10)
'''


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], None]:
    """Puts a module with an entry point on the path, as pip would."""

    def put(source: str, entry_point: str) -> None:
        (tmp_path / "own_policy.py").write_text(source)
        info = tmp_path / "own_policy-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: own-policy\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[vtoken.policies]\n{entry_point}\n")
        monkeypatch.syspath_prepend(tmp_path)
        monkeypatch.delitem(sys.modules, "own_policy", raising=False)

    return put


@pytest.mark.parametrize(
    "name",
    ["h2o", "none", "paged_eviction", "random", "scissorhands", "sliding_window", "snapkv", "streaming_llm", "tova"],
)
def test_every_shipped_policy_is_found_by_its_own_name(name: str) -> None:
    assert get_policy(name).name == name


def test_get_policy_gives_an_instance() -> None:
    assert isinstance(get_policy("h2o"), H2OPolicy)
    assert isinstance(get_policy("none"), NoEvictionPolicy)


def test_an_unknown_name_is_refused_with_the_closest_known_one() -> None:
    with pytest.raises(SpecError, match="unknown policy 'streaming_lm': did you mean 'streaming_llm'"):
        get_policy("streaming_lm")


def test_a_new_policy_is_one_short_file_and_one_entry_point(
    install: Callable[[str, str], None], make_view: Callable[..., RequestView]
) -> None:
    assert len(OWN_POLICY.splitlines()) < 50
    install(OWN_POLICY, "mean_mass = own_policy:MeanMassPolicy")
    policy = get_policy("mean_mass")
    view = make_view(4, kv_budget=3, mass=[4.0, 6.0, 1.0, 2.0])  # means 1, 2, 0.5, 2
    assert policy.select_victims(view) == [2]


def test_a_plain_object_of_the_right_shape_is_a_policy(
    install: Callable[[str, str], None], make_view: Callable[..., RequestView]
) -> None:
    source = (
        "class Newest:\n"
        "    name, signals = 'newest', frozenset()\n"
        "    def select_victims(self, view):\n"
        "        return list(view.live_positions)[view.budget:]\n"
        "newest = Newest()\n"
    )
    install(source, "newest = own_policy:newest")
    assert get_policy("newest").select_victims(make_view(5, kv_budget=3)) == [3, 4]


def test_what_is_no_policy_is_refused_with_what_it_lacks(install: Callable[[str, str], None]) -> None:
    install("class Half:\n    name = 'half'\n", "half = own_policy:Half")
    with pytest.raises(SpecError, match=r"policy 'half' .* lacks signals, select_victims"):
        get_policy("half")


def test_a_policy_class_that_needs_arguments_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    class Needy:
        def __init__(self, budget: int) -> None:
            self.budget = budget

    monkeypatch.setattr("vtoken.plugins.get_plugin", lambda group, name: Needy)
    with pytest.raises(SpecError, match=r"policy 'needy' .* cannot be made: .*budget.*; register an object instead"):
        get_policy("needy")
