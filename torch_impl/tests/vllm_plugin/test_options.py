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
        ({**ENGINE, "copy_stream": "own"}, "copy_stream='own': copies run on the compute stream"),
        ({**ENGINE, "verify": True}, "verify=True: online verification is not there yet"),
        ({**ENGINE, "mode": "lazy"}, "mode='lazy': vLLM's kernels read packed layouts alone"),
        ({**ENGINE, "regime": "fenced"}, "regime='fenced'"),
        ({**ENGINE, "timeline": "x"}, "timeline='x'"),
        ({**ENGINE, "replay_trace": 3}, "replay_trace=3: give the path"),
        ({**ENGINE, "policy": "h2o"}, "policy='h2o' needs attention_mass, which the vLLM plugin does not collect yet"),
        ({**ENGINE, "policy": "h20"}, "did you mean"),
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


@pytest.mark.parametrize(
    ("extra_args", "words"),
    [
        ({"vtoken_budget": 0}, "vtoken_budget=0: give a number of tokens of at least 1"),
        ({"vtoken_budget": "many"}, "vtoken_budget='many': give a number"),
        ({"vtoken_ratio": 2}, "vtoken_ratio=2: give a share"),
        ({"vtoken_budget": 5, "vtoken_ratio": 0.5}, "exactly one of kv_budget and eviction_ratio"),
        ({"vtoken_sinks": -1}, "vtoken_sinks=-1: give an integer"),
        ({"vtoken_recent": 1.5}, "vtoken_recent=1.5"),
        ({"vtoken_seed": "x"}, "vtoken_seed='x'"),
        ({"vtoken_policy": "h2o"}, "vtoken_policy='h2o' needs attention_mass"),
        ({"vtoken_policy": "sreaming_llm"}, "did you mean 'streaming_llm'"),
        ({"vtoken_policy": 3}, "vtoken_policy=3: name a policy"),
        ({"vtoken_protect": [1, 2, 3]}, "vtoken_protect=[1, 2, 3]: give [a0, b0, a1, b1, ...]"),
        ({"vtoken_protect": [9, 2]}, "protected"),
        ({"vtoken_protect": "prompt"}, "vtoken_protect='prompt'"),
        ({"vtoken_protect": [0, 4], "vtoken_protect_prompt": 1}, "give one of both"),
        ({"vtoken_off": "yes"}, "vtoken_off='yes': give true or false"),
        ({"vtoken_bugdet": 4}, "did you mean 'vtoken_budget'"),
        ({"vtoken": 4}, "vtoken=4: give a mapping"),
        ({"vtoken": {"kv_budget": 4}, "vtoken_seed": 1}, "give one of both forms"),
        ({"vtoken": {"when": "always"}}, "when='always': it holds for the whole engine"),
        ({"vtoken": {"nonsense": 1}}, "nonsense=1: unknown option"),
    ],
)
def test_bad_request_settings_name_field_value_and_remedy(extra_args, words):
    with pytest.raises(SpecError) as caught:
        request_config(extra_args, DEFAULT)
    assert words in str(caught.value)
