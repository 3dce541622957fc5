"""What is refused at start: each alone, and all of it in one message."""

import re
from types import SimpleNamespace

import pytest
from vllm_plain_config import plain_config

_REMEDY = re.compile(r"\S: (use|serve|set|give|leave|did you mean) \S")


def assert_remedies(reasons):
    """Each is "what: remedy"."""
    assert [reason for reason in reasons if not _REMEDY.search(reason)] == []


BAD = {
    "parallel_config__pipeline_parallel_size": (2, "pipeline parallelism"),
    "parallel_config__decode_context_parallel_size": (2, "decode context parallelism"),
    "parallel_config__prefill_context_parallel_size": (2, "prefill context parallelism"),
    "parallel_config__enable_dbo": (True, "dual batch overlap"),
    "parallel_config__worker_cls": ("vllm.v1.worker.cpu_worker.CPUWorker", "set worker_cls="),
    "scheduler_config__scheduler_cls": (None, "set scheduler_cls="),
    "cache_config__kv_sharing_fast_prefill": (True, "kv_sharing_fast_prefill"),
    "model_config__is_encoder_decoder": (True, "encoder-decoder models"),
    "model_config__uses_alibi": (True, "ALiBi"),
    "model_config__runner_type": ("pooling", "pooling models"),
    "device_config__device_type": ("xpu", "device xpu"),
    "kv_transfer_config": (SimpleNamespace(), "KV connectors"),
    "ec_transfer_config": (SimpleNamespace(), "encoder-cache connectors"),
    "kv_events_config": (SimpleNamespace(enable_kv_cache_events=True), "KV events"),
    "speculative_config": (SimpleNamespace(method="eagle"), "speculative decoding (method='eagle')"),
    "additional_config": ({"vtoken": {"policy": "h20", "kv_budget": 64}}, "did you mean 'h2o'"),
}


@pytest.mark.parametrize("is_v2", [False, True], ids=["V1", "V2"])
def test_a_plain_engine_is_not_refused(is_v2):
    from vtoken_torch.vllm_plugin.compat import config_refusals

    assert config_refusals(plain_config(use_v2_model_runner=is_v2)) == []


def test_a_copy_stream_of_its_own_is_refused_where_the_device_has_no_engine(monkeypatch):
    from vtoken_torch.vllm_plugin.compat import config_refusals
    from vtoken_torch.vllm_plugin.copy_streams import OWN_STREAMS

    own = plain_config(additional_config={"vtoken": {"policy": "random", "kv_budget": 64, "copy_stream": "own"}})
    (reason,) = config_refusals(own)
    assert "copy_stream='own' on device cpu, which has no streams to copy on: use 'compute' or 'sync'" in reason
    monkeypatch.setitem(OWN_STREAMS, "cpu", object)
    assert config_refusals(own) == []


def test_a_copy_stream_of_its_own_is_refused_where_several_ranks_copy(monkeypatch):
    """Only one rank's report of finished copies reaches the scheduler."""
    from vtoken_torch.vllm_plugin.compat import config_refusals
    from vtoken_torch.vllm_plugin.copy_streams import OWN_STREAMS

    monkeypatch.setitem(OWN_STREAMS, "cpu", object)
    own = {"vtoken": {"policy": "random", "kv_budget": 64, "copy_stream": "own"}}
    (reason,) = config_refusals(plain_config(additional_config=own, parallel_config__tensor_parallel_size=2))
    assert "copy_stream='own' with tensor_parallel_size=2" in reason
    assert_remedies([reason])
    assert config_refusals(plain_config(parallel_config__tensor_parallel_size=2)) == []


def test_the_start_line_names_what_is_on_and_what_is_off_and_why():
    from vtoken_torch.vllm_plugin.compat import start_line
    from vtoken_torch.vllm_plugin.options import PluginOptions

    settings = {"policy": "random", "kv_budget": 64, "copy_stream": "sync", "metrics": False, "recycle": False}
    config = plain_config(use_v2_model_runner=True, cache_config__enable_prefix_caching=False)
    line = start_line(PluginOptions.required({"vtoken": settings}), config, 32, 65)
    shown, on, off = line.split("; ")
    for words in (
        *("policy=random", "kv_budget=64", "runner=V2", "copy_stream=sync", "keep_prompt_cache=false", "drafts=none"),
        *("interval=64", "when=pressure", "signal_source=attention"),
        "pool of 64 blocks of 32",
    ):
        assert words in shown
    assert on == "on: nothing"
    assert off == (
        "off: metrics (metrics=false), online verification (verify=false), timeline (timeline is not set), "
        "prefix caching (enable_prefix_caching=False), recycling (recycle=false), attention mass (policy=random looks "
        "at none, a request's own policy may), asynchronous scheduling (async_scheduling=False)"
    )
    everything = {"policy": "h2o", "kv_budget": 64, "verify": True, "timeline": "t", "keep_prompt_cache": True}
    config = plain_config(scheduler_config__async_scheduling=True, speculative_config=SimpleNamespace(method="ngram"))
    line = start_line(PluginOptions.required({"vtoken": everything}), config, 32, 65)
    assert "keep_prompt_cache=true, drafts=ngram" in line
    assert "on: metrics, online verification, timeline, prefix caching, recycling, attention mass, asynch" in line
    assert line.endswith("; off: nothing")
    naive = PluginOptions.required({"vtoken": {"policy": "random", "kv_budget": 64, "variant": "naive"}})
    assert "recycling (variant=naive)" in start_line(naive, plain_config(), 32, 65)
    ratio = PluginOptions.required({"vtoken": {"policy": "random", "eviction_ratio": 0.5, "when": "always"}})
    assert "policy=random, eviction_ratio=0.5, interval=64, " in start_line(ratio, plain_config(), 32, 65)
    assert "when=always" in start_line(ratio, plain_config(), 32, 65)
    none = PluginOptions.required({"vtoken": {"policy": "none"}})
    assert "policy=none, no budget, interval=64, " in start_line(none, plain_config(), 32, 65)
    lazy = start_line(PluginOptions.required({"vtoken": {**settings, "mode": "lazy"}}), plain_config(), 32, 65)
    assert "mode=lazy" in lazy
    assert "recycling (mode=lazy)" in lazy


@pytest.mark.parametrize("path", BAD)
def test_each_setting_is_refused_alone(path):
    from vtoken_torch.vllm_plugin.compat import config_refusals

    value, words = BAD[path]
    (reason,) = config_refusals(plain_config(**{path: value}))
    assert words in reason
    assert_remedies([reason])


def test_every_refused_setting_is_a_field_of_vllms_configuration(tiny_llama):
    """Were one renamed, its refusal would be off unseen; so a missing one raises, at start too."""
    import vllm_world
    from vllm.config import KVEventsConfig
    from vllm.engine.arg_utils import EngineArgs

    from vtoken_torch.vllm_plugin.compat import _REFUSED_SETTINGS, _setting, config_refusals, start_line
    from vtoken_torch.vllm_plugin.options import PluginOptions

    settings = vllm_world.engine_settings({"policy": "random", "kv_budget": 64})
    config = EngineArgs(model=tiny_llama, kv_events_config=KVEventsConfig(), **settings).create_engine_config()
    assert {path: _setting(config, path) for path, *_ in _REFUSED_SETTINGS} == {
        path: harmless for path, harmless, *_ in _REFUSED_SETTINGS
    }
    assert config_refusals(config) == []
    line = start_line(PluginOptions.required(config.additional_config), config, 32, 65)
    assert "prefix caching (enable_prefix_caching=False)" in line
    for missing in ("cache_config.kv_sharing_fast_prefil", "cache_confg.kv_sharing_fast_prefill"):
        with pytest.raises(AttributeError, match=missing.replace("cache_config.", "").partition(".")[0]):
            _setting(config, missing)


def test_one_message_names_all_reasons():
    from vtoken_torch.vllm_plugin.compat import config_refusals, raise_all

    with pytest.raises(ValueError, match="vToken cannot run with") as caught:
        raise_all(config_refusals(plain_config(**{path: value for path, (value, _) in BAD.items()})))
    assert all(words in str(caught.value) for _, words in BAD.values())


def test_layers_without_token_wise_kv_are_refused():
    import torch
    from vllm.v1.kv_cache_interface import FullAttentionSpec, MLAAttentionSpec, SlidingWindowSpec

    from vtoken_torch.vllm_plugin.compat import layer_refusals

    shape = {"block_size": 32, "num_kv_heads": 2, "head_size": 32, "dtype": torch.float32}
    full = FullAttentionSpec(**shape)
    assert layer_refusals({"a": full, "b": full}, {}) == []
    cases = {
        "MLAAttentionSpec": MLAAttentionSpec(**{**shape, "num_kv_heads": 1}),
        "SlidingWindowSpec": SlidingWindowSpec(**shape, sliding_window=64),
        "sliding-window or chunked-local": FullAttentionSpec(**shape, sliding_window=64),
        "chunked-local": FullAttentionSpec(**shape, attention_chunk_size=64),
        "quantized KV": FullAttentionSpec(**{**shape, "dtype": torch.float8_e4m3fn}),
        "hybrid models": FullAttentionSpec(**{**shape, "head_size": 64}),
    }
    for words, spec in cases.items():
        reasons = layer_refusals({"a": full, "b": spec}, {})
        assert any(words in reason for reason in reasons), words
        assert_remedies(reasons)
    layers = {"a": SimpleNamespace(impl=SimpleNamespace(alibi_slopes=[1.0]))}
    (reason,) = layer_refusals({"a": full}, layers)
    assert "ALiBi (first: a)" in reason
    assert_remedies([reason])


def test_other_block_managers_are_refused_with_the_remedy():
    from vtoken_torch.vllm_plugin.scheduler import VTokenScheduler

    engine = SimpleNamespace(vllm_config=plain_config())
    (groups,) = VTokenScheduler._refusals(engine, [object(), object()])
    (kept_by,) = VTokenScheduler._refusals(engine, [object()])
    assert "2 KV cache groups" in groups
    assert "blocks kept by object" in kept_by
    assert_remedies([groups, kept_by])


def test_speculation_and_missing_settings_name_their_remedies():
    from vtoken_torch.vllm_plugin.compat import config_refusals

    reasons = config_refusals(
        plain_config(
            speculative_config=SimpleNamespace(method="ngram"),
            scheduler_config__async_scheduling=True,
            use_v2_model_runner=True,
            additional_config={"vtoken": {"policy": "h2o", "kv_budget": 64}},
        )
    )
    assert len(reasons) == 3
    assert_remedies([*reasons, *config_refusals(plain_config(additional_config={}))])


def test_another_vllm_is_refused_by_name(monkeypatch):
    import vllm

    from vtoken_torch.vllm_plugin.compat import check_vllm

    check_vllm()
    for version in ("0.31.2", "0.33.0", "0.320.1", "1.0"):
        monkeypatch.setattr(vllm, "__version__", version)
        with pytest.raises(RuntimeError, match=r"works with vLLM 0\.32\.x, this is " + version):
            check_vllm()


def test_an_engine_of_several_has_files_of_its_own(world, tokens, tmp_path, monkeypatch):
    """Data parallelism, as far as one process shows it: an engine that is told that it is the second one."""
    from vtoken_torch.vllm_plugin.scheduler import VTokenScheduler

    init = VTokenScheduler.__init__

    def init_second(self, vllm_config, *args, **kwargs):
        vllm_config.parallel_config.data_parallel_index = 1
        init(self, vllm_config, *args, **kwargs)

    monkeypatch.setattr(VTokenScheduler, "__init__", init_second)
    settings = {"policy": "streaming_llm", "kv_budget": 40, "interval": 8, "when": "always"}
    files = {"record_trace": str(tmp_path / "victims.jsonl"), "timeline": str(tmp_path / "steps.jsonl")}
    with world({**settings, **files}) as engine:
        engine.generate([tokens(60)], 20)
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"victims.1.jsonl", "steps.1.jsonl", "steps.1.perfetto.json"}
    with world({**settings, "replay_trace": files["record_trace"]}) as engine:
        engine.generate([tokens(60)], 20)
        assert engine.counts["recycled"] + engine.counts["moves"] > 0


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"worker_cls": "auto"}, "set worker_cls="),
        ({"scheduler_cls": None}, "set scheduler_cls="),
        ({"additional_config": {}}, "no settings: give additional_config"),
        ({"additional_config": {"vtoken": {"policy": "h20", "kv_budget": 9}}}, "did you mean 'h2o'"),
    ],
)
def test_a_real_engine_refuses_to_start_half_enabled(world, settings, words):
    from vtoken_torch.vllm_plugin.compat import SCHEDULER, WORKER

    enabled = {
        "scheduler_cls": SCHEDULER,
        "worker_cls": WORKER,
        "additional_config": {"vtoken": {"policy": "streaming_llm", "kv_budget": 64}},
    }
    with pytest.raises(ValueError, match=words):
        world(None, **{**enabled, **settings})


def test_a_real_engine_refuses_a_model_with_a_sliding_window(world):
    """Known only once the model is there."""
    with pytest.raises(ValueError, match=r"vToken cannot run with:\n  - SlidingWindowSpec layers .* full attention"):
        world({"policy": "random", "kv_budget": 64}, hf_overrides={"sliding_window": 64})
