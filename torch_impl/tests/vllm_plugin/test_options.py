import pytest

from vtoken.config import VTokenConfig
from vtoken.errors import SpecError
from vtoken_torch.vllm_plugin.options import PluginOptions, request_config

ENGINE = {"policy": "streaming_llm", "kv_budget": 256}
DEFAULT = VTokenConfig(**ENGINE)


def test_no_vtoken_key_means_not_enabled():
    assert PluginOptions.from_additional_config({}) is None
    assert PluginOptions.from_additional_config(None) is None
    assert PluginOptions.from_additional_config({"other": 1}) is None


def test_engine_options_become_one_checked_config(tmp_path):
    options = PluginOptions.from_additional_config(
        {"vtoken": {**ENGINE, "when": "always", "copy_stream": "compute", "record_trace": str(tmp_path / "t")}}
    )
    assert options.config == VTokenConfig(**ENGINE, when="always")
    assert options.record_trace == tmp_path / "t"
    assert options.replay_trace is None


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (7, "give a mapping"),
        ({}, "policy is missing"),
        ({**ENGINE, "kv_bugdet": 1}, "did you mean 'kv_budget'"),
        ({**ENGINE, "copy_stream": "side"}, "copy_stream='side': give 'compute', 'own' or 'sync'"),
        ({**ENGINE, "verify": "yes"}, "verify='yes': give true or false"),
        ({**ENGINE, "signal_source": "keys"}, "signal_source='keys': give 'attention' or 'score_pass'"),
        ({**ENGINE, "signal_source": "score_pass", "score_every": 0}, "score_every=0: give an integer of at least 1"),
        ({**ENGINE, "score_every": 8}, "score_every=8: only the score pass samples: give signal_source='score_pass'"),
        ({**ENGINE, "unproven_device": "cuda"}, "unproven_device='cuda': give true or false"),
        ({**ENGINE, "mode": "lazy", "keep_prompt_cache": True}, "keep_prompt_cache=True: mode 'lazy' copies"),
        ({**ENGINE, "regime": "fenced"}, "regime='fenced'"),
        ({**ENGINE, "timeline": 3}, "timeline=3: give the path of a file"),
        ({**ENGINE, "replay_trace": 3}, "replay_trace=3: give the path"),
        ({**ENGINE, "timeline": "a/../t", "record_trace": "t"}, "record_trace='t': it is the file of timeline too"),
        ({**ENGINE, "replay_trace": "t", "record_trace": "t"}, "record_trace='t': it is the file of replay_trace too"),
        ({**ENGINE, "policy": "h20"}, "did you mean"),
        (
            {**ENGINE, "variant": "naive", "keep_prompt_cache": True},
            "keep_prompt_cache=True: the variant 'naive' copies",
        ),
        ({**ENGINE, "keep_prompt_cache": 3}, "keep_prompt_cache=3: give true or false"),
    ],
)
def test_bad_engine_options_are_refused_with_the_remedy(given, words):
    with pytest.raises(SpecError) as caught:
        PluginOptions.from_additional_config({"vtoken": given})
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("extra_args", "changes"),
    [
        ({}, {}),
        ({"unrelated": 1}, {}),
        (
            {"vtoken_budget": 100, "vtoken_policy": "random", "vtoken_seed": 3},
            {"kv_budget": 100, "policy": "random", "seed": 3},
        ),
        ({"vtoken_ratio": 0.5}, {"kv_budget": None, "eviction_ratio": 0.5}),
        ({"vtoken_sinks": 2, "vtoken_recent": 9}, {"num_sinks": 2, "recent": 9}),
        ({"vtoken_protect": [0, 4, 10, 20]}, {"protected": ((0, 4), (10, 20))}),
        ({"vtoken_protect_prompt": 1}, {"protected": "prompt"}),
        ({"vtoken_protect_prompt": False}, {}),
        ({"vtoken_off": True, "vtoken_budget": 9}, {"policy": "none", "kv_budget": None}),
        ({"vtoken": {"kv_budget": 7, "protected": [[0, 4]]}}, {"kv_budget": 7, "protected": ((0, 4),)}),
        ({"vtoken": {"off": True}}, {"policy": "none", "kv_budget": None}),
    ],
)
def test_a_request_changes_the_engines_config(extra_args, changes):
    assert request_config(extra_args, DEFAULT) == DEFAULT.with_changes(**changes)


NO_BUDGET = VTokenConfig(policy="none")
PAIRS = "give [a0, b0, a1, b1, ...], half-open ranges one after another, each with 0 <= a <= b"
NEEDS_BUDGET = "it has no budget, neither here nor from the engine: give"


@pytest.mark.parametrize(
    ("extra_args", "default", "message"),
    [
        ({"vtoken_budget": 0}, DEFAULT, "vtoken_budget=0: give a whole number of tokens of at least 2"),
        *(
            (
                {"vtoken_budget": one},
                DEFAULT,
                f"vtoken_budget={one}: give a whole number of tokens of at least 2",
            )
            for one in (1, True)
        ),
        ({"vtoken": {"kv_budget": True}}, DEFAULT, "kv_budget=True: give a whole number of tokens of at least 1"),
        ({"vtoken_ratio": float("nan")}, DEFAULT, "vtoken_ratio=nan: give a share between 0 and 1"),
        *(
            ({field: value}, DEFAULT, f"{field}={value!r}: give integers below 2**63")
            for field, value in (("vtoken_budget", 2**63), ("vtoken_seed", 10**30), ("vtoken_protect", [0, 2**64]))
        ),
        ({"vtoken": {"interval": 2**63}}, DEFAULT, f"interval={2**63}: give integers below 2**63"),
        (
            {"vtoken": {"protected": [[0, 2**63]]}},
            DEFAULT,
            f"protected=[[0, {2**63}]]: give integers below 2**63",
        ),
        ({"vtoken_budget": "many"}, DEFAULT, "vtoken_budget='many': give a whole number of tokens of at least 2"),
        ({"vtoken_ratio": 2}, DEFAULT, "vtoken_ratio=2: give a share between 0 and 1"),
        ({"vtoken_ratio": 1}, DEFAULT, "vtoken_ratio=1 would drop every token: give a share below 1"),
        (
            {"vtoken_budget": 5, "vtoken_ratio": 0.5},
            DEFAULT,
            "vtoken_budget=5 beside vtoken_ratio=0.5: give one of both",
        ),
        (
            {"vtoken": {"kv_budget": 5, "eviction_ratio": 0.5}},
            DEFAULT,
            "kv_budget=5 beside eviction_ratio=0.5: give one of both",
        ),
        (
            {"vtoken_policy": "random"},
            NO_BUDGET,
            f"vtoken_policy='random': {NEEDS_BUDGET} vtoken_budget or vtoken_ratio",
        ),
        ({"vtoken": {"policy": "random"}}, NO_BUDGET, f"policy='random': {NEEDS_BUDGET} kv_budget or eviction_ratio"),
        (
            {"vtoken": {"kv_budget": None}},
            DEFAULT,
            f"policy='streaming_llm': {NEEDS_BUDGET} kv_budget or eviction_ratio",
        ),
        ({"vtoken_sinks": -1}, DEFAULT, "vtoken_sinks=-1: give an integer of at least 0"),
        ({"vtoken_recent": 1.5}, DEFAULT, "vtoken_recent=1.5: give an integer of at least 0"),
        ({"vtoken_seed": "x"}, DEFAULT, "vtoken_seed='x': give an integer of at least 0"),
        ({"vtoken": {"interval": 0}}, DEFAULT, "interval=0: give an integer of at least 1"),
        ({"vtoken": {"page_size": "8"}}, DEFAULT, "page_size='8': give an integer of at least 1"),
        *(
            (
                {"vtoken_policy": "sreaming_llm"},
                default,
                "vtoken_policy='sreaming_llm': unknown policy 'sreaming_llm': did you mean 'streaming_llm'?",
            )
            for default in (DEFAULT, NO_BUDGET)
        ),
        *(
            (
                {"vtoken_policy": 3},
                default,
                "vtoken_policy=3: name a policy, for example 'streaming_llm' ('none' evicts nothing)",
            )
            for default in (DEFAULT, NO_BUDGET)
        ),
        *(
            ({"vtoken_protect": ranges}, DEFAULT, f"vtoken_protect={ranges!r}: {PAIRS}")
            for ranges in ([1, 2, 3], [9, 2], [-1, 2], [0, 2.5], [0, True], ["a", 2], "prompt")
        ),
        (
            {"vtoken": {"protected": [[9, 2]]}},
            DEFAULT,
            "protected range (9, 2): give 0 <= start <= end",
        ),
        (
            {"vtoken_protect": [0, 4], "vtoken_protect_prompt": 1},
            DEFAULT,
            "vtoken_protect_prompt=true beside vtoken_protect=[0, 4]: give one of both",
        ),
        (
            {"vtoken": {"protected": [[0, 4]], "protect_prompt": True}},
            DEFAULT,
            "protect_prompt=true beside protected=[[0, 4]]: give one of both",
        ),
        ({"vtoken_off": "yes"}, DEFAULT, "vtoken_off='yes': give true or false"),
        ({"vtoken_bugdet": 4}, DEFAULT, "vtoken_bugdet=4: unknown option, did you mean 'vtoken_budget'?"),
        ({"vtoken": 4}, DEFAULT, "vtoken=4: give a mapping, for example {'kv_budget': 256}"),
        (
            {"vtoken": {"kv_budget": 4}, "vtoken_seed": 1},
            DEFAULT,
            "vtoken={'kv_budget': 4} beside vtoken_seed: give one of both forms",
        ),
        (
            {"vtoken": {"when": "always"}},
            DEFAULT,
            "when='always': it holds for the whole engine, set it in additional_config",
        ),
        (
            {"vtoken_when": "always"},
            DEFAULT,
            "vtoken_when='always': it holds for the whole engine, set it in additional_config",
        ),
        ({"vtoken_num_sinks": 4}, DEFAULT, "vtoken_num_sinks=4: unknown option, did you mean 'vtoken_sinks'?"),
        (
            {"vtoken_interval": 4},
            DEFAULT,
            (
                "vtoken_interval=4: unknown option, known: vtoken_policy, vtoken_budget, vtoken_ratio, vtoken_sinks, "
                "vtoken_recent, vtoken_seed, vtoken_protect, vtoken_protect_prompt, vtoken_off"
            ),
        ),
        (
            {"vtoken": {"nonsense": 1}},
            DEFAULT,
            (
                "nonsense=1: unknown option, known: policy, kv_budget, eviction_ratio, num_sinks, recent, seed, "
                "protected, interval, page_size, off, protect_prompt"
            ),
        ),
    ],
)
def test_bad_request_settings_name_field_value_and_remedy(extra_args, default, message):
    with pytest.raises(SpecError) as caught:
        request_config(extra_args, default)
    assert str(caught.value) == message


@pytest.mark.parametrize(("variant", "is_lazy"), [("vtoken", True), ("naive", False), ("native", False)])
def test_variants_that_move_nothing_have_no_mode(variant, is_lazy):
    given = {**ENGINE, "mode": "lazy", "variant": variant}
    assert PluginOptions.required({"vtoken": given}).is_lazy is is_lazy
    assert not PluginOptions.required({"vtoken": {**given, "mode": "eager"}}).is_lazy


def test_a_request_brings_the_budget_that_an_engine_without_a_policy_lacks():
    changes = {"policy": "random", "kv_budget": 9}
    assert request_config({"vtoken_policy": "random", "vtoken_budget": 9}, NO_BUDGET) == NO_BUDGET.with_changes(
        **changes
    )
    assert request_config({"vtoken_budget": 9}, NO_BUDGET) == NO_BUDGET.with_changes(kv_budget=9)
    assert request_config({"vtoken": {"interval": 8, "page_size": 4}}, DEFAULT) == DEFAULT.with_changes(
        interval=8, page_size=4
    )


def test_each_engine_of_several_has_files_of_its_own():
    files = {"record_trace": "a/victims.jsonl", "replay_trace": "b/victims.jsonl", "timeline": "c/steps.jsonl"}
    options = PluginOptions.required({"vtoken": {**ENGINE, **files}})
    assert options.of_engine(0) == options
    third = options.of_engine(2)
    assert [str(path) for path in (third.record_trace, third.replay_trace, third.timeline)] == [
        "a/victims.2.jsonl",
        "b/victims.2.jsonl",
        "c/steps.2.jsonl",
    ]
    none = PluginOptions.required({"vtoken": ENGINE})
    assert none.of_engine(2) == none


@pytest.mark.parametrize("policy", ["h2o", "scissorhands", "tova", "snapkv", "paged_eviction"])
def test_policies_that_look_at_attention_are_served(policy):
    assert request_config({"vtoken_policy": policy}, DEFAULT).policy == policy
    assert PluginOptions.required({"vtoken": {**ENGINE, "policy": policy}}).config.policy == policy


def test_a_policy_that_looks_at_keys_is_refused(tmp_path, monkeypatch):
    (tmp_path / "keys_alone.py").write_text(
        "from vtoken.policies import Policy, Signal\n\n\n"
        "class KeysAlone(Policy):\n"
        '    name = "keys_alone"\n'
        "    signals = frozenset({Signal.KEY_NORM, Signal.ATTENTION_MASS})\n"
    )
    info = tmp_path / "keys_alone-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: keys-alone\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[vtoken.policies]\nkeys_alone = keys_alone:KeysAlone\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(SpecError, match="vtoken_policy='keys_alone' needs key_norm, which the vLLM plugin does not"):
        request_config({"vtoken_policy": "keys_alone"}, DEFAULT)


@pytest.mark.parametrize("extra_args", [{"vtoken": {3: 4}}, {"vtoken": {None: 1}}, [1], "vtoken"])
def test_what_is_no_mapping_of_names_is_refused_by_its_value(extra_args):
    with pytest.raises(SpecError, match=r"^(vtoken|extra_args)=.*(give a mapping|use one of)"):
        request_config(extra_args, DEFAULT)


def test_numbers_among_others_extra_args_are_none_of_ours():
    assert request_config({3: 4, "other": 5}, DEFAULT) is DEFAULT
