import dataclasses
import json
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vtoken.config import VTokenConfig
from vtoken.errors import SpecError


def config(**options: Any) -> VTokenConfig:
    return VTokenConfig(**{"policy": "h2o", "kv_budget": 64, **options})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"policy": ""}, "policy='': name a policy, for example 'streaming_llm'"),
        ({"policy": 3}, "policy=3: name a policy"),
        ({"kv_budget": None}, "policy 'h2o' needs exactly one of kv_budget and eviction_ratio, got none"),
        ({"eviction_ratio": 0.5}, "exactly one of kv_budget and eviction_ratio, got ['kv_budget', 'eviction_ratio']"),
        ({"kv_budget": 0}, "kv_budget=0: give a whole number of tokens of at least 1"),
        ({"kv_budget": 2.5}, "kv_budget=2.5: give a whole number of tokens of at least 1"),
        ({"kv_budget": True}, "kv_budget=True: give a whole number of tokens of at least 1"),
        ({"kv_budget": None, "eviction_ratio": 1}, "eviction_ratio=1 would drop every token: give a share below 1"),
        ({"kv_budget": None, "eviction_ratio": -0.1}, "eviction_ratio=-0.1: give a share between 0 and 1"),
        ({"kv_budget": None, "eviction_ratio": float("nan")}, "eviction_ratio=nan: give a share between 0 and 1"),
        ({"kv_budget": None, "eviction_ratio": "half"}, "eviction_ratio='half': give a share between 0 and 1"),
        ({"interval": 0}, "interval=0: give an integer of at least 1"),
        ({"interval": 1.0}, "interval=1.0: give an integer of at least 1"),
        ({"page_size": 0}, "page_size=0: give an integer of at least 1"),
        ({"history": 0}, "history=0: give an integer of at least 1"),
        ({"smooth": 0}, "smooth=0: give an integer of at least 1"),
        ({"smooth": 4}, "smooth=4: give an odd window, so that it has a middle (1 is off)"),
        ({"num_sinks": -1}, "num_sinks=-1: give an integer of at least 0"),
        ({"recent": -1}, "recent=-1: give an integer of at least 0"),
        ({"seed": "abc"}, "seed='abc': give an integer of at least 0"),
        ({"cooldown_steps": -1}, "cooldown_steps=-1: give an integer of at least 0"),
        ({"min_source_blocks": -1}, "min_source_blocks=-1: give an integer of at least 0"),
        ({"decay": 1.5}, "decay=1.5: give a share between 0 and 1"),
        ({"theta_fragmentation": 2}, "theta_fragmentation=2: give a share between 0 and 1"),
        ({"source_utilization": -1}, "source_utilization=-1: give a share between 0 and 1"),
        ({"low_watermark": True}, "low_watermark=True: give a share between 0 and 1"),
        ({"headroom": 5}, "headroom=5: give a share between 0 and 1"),
        ({"pressure_high": float("inf")}, "pressure_high=inf: give a share between 0 and 1"),
        ({"pressure_low": 0.5}, "pressure_low=0.5 exceeds pressure_high=0.1: swap them"),
        ({"recycle": "yes"}, "recycle='yes': give true or false"),
        ({"variant": "fast"}, "variant='fast': choose one of native, naive, vtoken"),
        ({"mode": "lasy"}, "mode='lasy': choose one of eager, lazy"),
        ({"when": "never"}, "when='never': choose one of pressure, always"),
        ({"regime": None}, "regime=None: choose one of ordered, fenced"),
        ({"protected": "promt"}, "protected='promt': give pairs [start, end), or 'prompt'"),
        ({"protected": 7}, "protected=7: give pairs [start, end), or 'prompt'"),
        ({"protected": [[0, 1, 2]]}, "protected=[[0, 1, 2]]: give pairs [start, end), or 'prompt'"),
        ({"protected": [[5, 2]]}, "protected range (5, 2): give 0 <= start <= end"),
        ({"protected": [[-4, 2]]}, "protected range (-4, 2): give 0 <= start <= end"),
        ({"protected": [[0, 1.5]]}, "protected range (0, 1.5): give 0 <= start <= end"),
    ],
)
def test_a_bad_value_is_refused_by_name_with_the_remedy(options: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError, match=re.escape(message)):
        config(**options)


@pytest.mark.parametrize("key", ["interval", "page_size", "num_sinks", "seed", "cooldown_steps", "decay", "headroom"])
def test_null_is_refused_where_it_has_no_meaning(key: str) -> None:
    with pytest.raises(SpecError, match=f"{key}=None"):
        config(**{key: None})


@pytest.mark.parametrize(
    ("key", "hint"),
    [
        ("kv_buget", "unknown option 'kv_buget': did you mean 'kv_budget'?"),
        ("num_sink", "unknown option 'num_sink': did you mean 'num_sinks'?"),
        ("xyz", "unknown option 'xyz': known keys: policy, kv_budget, eviction_ratio"),
    ],
)
def test_an_unknown_key_names_the_closest_known_one(key: str, hint: str) -> None:
    with pytest.raises(SpecError, match=re.escape(hint)):
        VTokenConfig.from_mapping({"policy": "h2o", "kv_budget": 64, key: 1})


def test_no_policy_is_the_default() -> None:
    with pytest.raises(SpecError, match="policy is missing: name one"):
        VTokenConfig.from_mapping({"kv_budget": 64})


def test_none_is_the_one_policy_without_a_budget() -> None:
    assert VTokenConfig(policy="none").budget_tokens(1000) == 1000


def test_a_config_is_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        config().kv_budget = 128  # type: ignore[misc]


def test_a_change_makes_a_checked_copy() -> None:
    before = config()
    assert before.with_changes(interval=16).interval == 16
    assert before.interval == 64
    with pytest.raises(SpecError, match="interval=0"):
        before.with_changes(interval=0)


def test_a_config_survives_the_way_through_json() -> None:
    before = config(protected=((0, 4), (9, 12)), smooth=17, when="always")
    assert VTokenConfig.from_mapping(json.loads(json.dumps(dataclasses.asdict(before)))) == before
    assert config(protected="prompt").protected == "prompt"


def test_configs_compare_and_hash_by_value_even_if_ranges_came_as_lists() -> None:
    assert config(protected=[[0, 4]]) == config(protected=((0, 4),))
    assert len({config(protected=[[0, 4]]), config(protected=((0, 4),))}) == 1


def test_four_sinks_are_kept_unless_asked_otherwise() -> None:
    assert config().num_sinks == 4
    assert config(num_sinks=0).num_sinks == 0


@given(computed=st.integers(0, 10**6), budget=st.integers(1, 10**6))
def test_a_budget_in_tokens_bounds_what_is_kept(computed: int, budget: int) -> None:
    assert config(kv_budget=budget).budget_tokens(computed) == min(budget, computed)


@given(computed=st.integers(0, 10**6), ratio=st.sampled_from([0.0, 0.25, 0.5, 0.75, 0.9375]))
def test_a_ratio_drops_its_share_of_the_computed_tokens_rounded_down(computed: int, ratio: float) -> None:
    kept = config(kv_budget=None, eviction_ratio=ratio).budget_tokens(computed)
    sixteenths = int(ratio * 16)
    assert kept == computed - computed * sixteenths // 16


def test_a_change_with_an_unknown_name_is_refused_like_any_option() -> None:
    with pytest.raises(SpecError, match="unknown option 'kv_budgets': did you mean 'kv_budget'"):
        config(kv_budget=64).with_changes(kv_budgets=3)


def test_no_sinks_are_legal_and_warned_of() -> None:
    assert config(kv_budget=64).warnings == ()
    assert "num_sinks=0" in config(kv_budget=64, num_sinks=0).warnings[0]


def test_a_budget_that_sinks_and_recent_tokens_alone_exceed_is_warned_of_with_both_numbers() -> None:
    warning = "kv_budget=10 cannot be met: num_sinks and recent always keep 12 tokens"
    assert config(kv_budget=10, num_sinks=4, recent=8).warnings == (warning,)
    assert config(kv_budget=12, num_sinks=4, recent=8).warnings == ()


@pytest.mark.parametrize(
    ("options", "prompt_len", "kept"),
    [
        ({"num_sinks": 4}, 50, 4),
        ({"num_sinks": 0}, 50, 0),
        ({"num_sinks": 4, "recent": 10}, 50, 14),
        ({"num_sinks": 4, "protected": "prompt"}, 50, 50),
        ({"num_sinks": 4, "protected": ((2, 10), (8, 20), (95, 120))}, 50, 25),
        ({"num_sinks": 4, "protected": ((90, 98),), "recent": 5}, 50, 14),
        ({"num_sinks": 200}, 50, 100),
        ({"recent": 200}, 50, 100),
    ],
)
def test_kept_tokens_are_those_that_no_policy_may_choose(options: dict[str, Any], prompt_len: int, kept: int) -> None:
    assert config(**options).kept_tokens(100, prompt_len) == kept
